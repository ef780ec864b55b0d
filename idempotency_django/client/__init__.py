"""Clients of httpx that retry with the same key. They need no Django."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .httpx import AsyncIdempotentClient, IdempotentClient
    from .retrying import OutcomeUnknown, RetryBudget, is_retryable, key_for

__all__ = [
    "AsyncIdempotentClient",
    "IdempotentClient",
    "OutcomeUnknown",
    "RetryBudget",
    "is_retryable",
    "key_for",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "AsyncIdempotentClient": "httpx",
        "IdempotentClient": "httpx",
        "OutcomeUnknown": "retrying",
        "RetryBudget": "retrying",
        "is_retryable": "retrying",
        "key_for": "retrying",
    },
)
