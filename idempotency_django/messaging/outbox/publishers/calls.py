"""The calls of :func:`~idempotency_django.messaging.outbox.after_commit`: the relay makes them."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.signing import BadSignature

from ....errors import OperationInProgress, StoreUnavailable
from ..calls import Call, EndsProcesses
from ..topics import topic
from .base import Outgoing, Publisher, Refused, SendLater, away, in_order


class CallPublisher(Publisher):
    """Calls the function of each message, in the process of the relay, one after the other.

    Args:
        topic: the topic.
        at_once: whether the process that has committed makes the first attempt itself, right after
            the commit.
    """

    def __init__(self, topic: str, *, at_once: bool = False) -> None:
        super().__init__(topic)

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        most = topic(self.topic).max_attempts
        return in_order(messages, lambda message: self.late() or _call(message, most))


def _call(message: Outgoing, max_attempts: int | None) -> Exception | None:
    try:
        call = Call.read(message.type, message.data)
    except BadSignature as error:
        return Refused(str(error), final=True)
    try:
        call.run_once(message.message_id, message.reference, max_attempts=max_attempts)
    except EndsProcesses as error:
        return Refused(str(error), final=True)
    except OperationInProgress as error:
        return SendLater(str(error), delay=error.remaining or 0)
    except (StoreUnavailable, ImportError) as error:
        return away(error)
    except Exception as error:  # noqa: BLE001  # it is the function's, whatever it is
        return error
    return None
