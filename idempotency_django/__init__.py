import logging

from .logs import escape_message

__version__ = "0.1.0"

# Here, because every module of the package is imported after this one and logs under this name.
logging.getLogger("idempotency_django").addFilter(escape_message)
