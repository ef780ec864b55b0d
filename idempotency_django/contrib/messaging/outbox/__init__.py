"""The outbox: messages that are sent if, and only if, the transaction around them is committed."""

from __future__ import annotations

from .calls import after_commit
from .publishing import publish

__all__ = ["after_commit", "publish"]
