"""Makes unsafe operations safe to retry: one effect, and every retry gets the first response.

What every project uses can be imported from here. The rest is in ``drf``, ``http``, ``client``,
``testing`` and the modules of ``contrib``.
"""

import logging
from typing import TYPE_CHECKING

from .lazy import lazily
from .logs import escape_message

if TYPE_CHECKING:
    from .decorators import idempotency_exempt, idempotent
    from .engine.context import ExecutionContext, current_execution
    from .engine.functions import aidempotent_call, idempotent_call
    from .errors import IdempotencyError
    from .http import IdempotentRequest
    from .policy import PAYMENT, Policy

__version__ = "1.0.0.dev0"

__all__ = [
    "PAYMENT",
    "ExecutionContext",
    "IdempotencyError",
    "IdempotentRequest",
    "Policy",
    "aidempotent_call",
    "current_execution",
    "idempotency_exempt",
    "idempotent",
    "idempotent_call",
]

# Here, because every module of the package is imported after this one and logs under this name.
logging.getLogger("idempotency_django").addFilter(escape_message)

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "ExecutionContext": "engine.context",
        "IdempotencyError": "errors",
        "IdempotentRequest": "http",
        "PAYMENT": "policy",
        "Policy": "policy",
        "aidempotent_call": "engine.functions",
        "current_execution": "engine.context",
        "idempotency_exempt": "decorators",
        "idempotent": "decorators",
        "idempotent_call": "engine.functions",
    },
)


def __dir__() -> list[str]:
    return __all__
