"""What became of a message: a closed set, from which a transport knows what to do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import FingerprintMismatch, MessageParked, OperationInProgress, UnknownEventType

_REJECTED = (MessageParked, FingerprintMismatch, UnknownEventType)


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler ran in this call, and what it did is committed. Acknowledge the message.

    Attributes:
        result: what the handler returned, as it reads back from JSON.
    """

    result: Any


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message was handled before. Acknowledge it.

    Attributes:
        result: what the handler returned at that time; ``None`` if it was not kept.
        kept: whether it was kept: it is not if it was too large, or if the policy has
            ``store_body=False``.
    """

    result: Any
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The message was not handled, and nothing that its handler did in the database is committed.

    Attributes:
        error: why; what :meth:`~.consumers.Consumer.handle` would have raised.
    """

    error: Exception

    @property
    def rejected(self) -> bool:
        """Whether to move the message to a dead-letter queue: another delivery ends the same way.

        ``False``: deliver it again.
        """
        return isinstance(self.error, _REJECTED)

    @property
    def delay(self) -> float | None:
        """Seconds after which to deliver it again, if another consumer's lease is in the way."""
        return self.error.remaining if isinstance(self.error, OperationInProgress) else None


Outcome = Handled | Duplicate | Failed
