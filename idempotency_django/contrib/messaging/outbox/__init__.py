"""The outbox: messages that are sent if, and only if, the transaction around them is committed."""

from __future__ import annotations

from .calls import after_commit
from .publishing import Message, publish, publish_many

__all__ = ["Message", "after_commit", "publish", "publish_many"]
