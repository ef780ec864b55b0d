"""What all HTTP adapters share: one adapter per request, and one way to serve it.

An adapter subclasses :class:`Adapter` and calls :func:`serve` or :func:`aserve`.
"""

from .dialects import dialect
from .messages import (
    REPLAYED_HEADER,
    Adapter,
    IdempotentRequest,
    invocation_of,
    meta_name,
    principal_of,
    problem_response,
    status_of,
)
from .replays import has_object, is_named_by_key, lookup_of
from .routes import readable_route
from .serving import aserve, serve
from .unwrapping import (
    EXEMPT,
    INBOX,
    PROTECTED,
    cached_on,
    innermost,
    is_marked,
    mark_part_of_view,
    name_of,
    protect_innermost,
)
from .views import IdempotencyStatusView
from .wrapping import ADAPTER, ViewAdapter, method_of, protect

__all__ = [
    "ADAPTER",
    "EXEMPT",
    "INBOX",
    "PROTECTED",
    "REPLAYED_HEADER",
    "Adapter",
    "IdempotencyStatusView",
    "IdempotentRequest",
    "ViewAdapter",
    "aserve",
    "cached_on",
    "dialect",
    "has_object",
    "innermost",
    "invocation_of",
    "is_marked",
    "is_named_by_key",
    "lookup_of",
    "mark_part_of_view",
    "meta_name",
    "method_of",
    "name_of",
    "principal_of",
    "problem_response",
    "protect",
    "protect_innermost",
    "readable_route",
    "serve",
    "status_of",
]
