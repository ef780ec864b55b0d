"""What all HTTP adapters share: one adapter per request, and one way to serve it.

An adapter subclasses :class:`Adapter` and calls :func:`serve` or :func:`aserve`.
"""

from .declared import INBOX, POLICY, PROTECTED, is_marked, name_of
from .invocations import invocation_of, meta_name, principal_of
from .replays import has_object, lookup_of
from .responses import REPLAYED_HEADER, STATUS_HEADER, media_type, problem_response, status_of
from .serving import Adapter, IdempotentRequest, aserve, serve
from .status import IdempotencyStatusView
from .wrapping import ADAPTER, ViewAdapter

__all__ = [
    "ADAPTER",
    "INBOX",
    "POLICY",
    "PROTECTED",
    "REPLAYED_HEADER",
    "STATUS_HEADER",
    "Adapter",
    "IdempotencyStatusView",
    "IdempotentRequest",
    "ViewAdapter",
    "aserve",
    "has_object",
    "invocation_of",
    "is_marked",
    "lookup_of",
    "media_type",
    "meta_name",
    "name_of",
    "principal_of",
    "problem_response",
    "serve",
    "status_of",
]
