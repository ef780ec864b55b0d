"""What an operator can do to messages of inbox and outbox, and what is said of it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _

from ..databases import database
from ..inbox import settling
from ..inbox.settling import NotSettled
from ..models import OutboxMessage
from ..models.outbox import OutboxState
from ..outbox import settling as outbox


@dataclass(frozen=True, slots=True)
class Settlement:
    """One way to settle a message.

    Attributes:
        name: of its page.
        title: what is going to be done.
        button: what leads to its page.
        states: of the messages that it can be done to.
        consequences: what happens then, for the operator who is asked.
        logged: the log entry.
        done: what follows, said after it was done.
        settle: does it to the message with this primary key, ``by`` somebody; raises
            ``NotSettled``.
        place: the column that says where a message belongs.
    """

    name: str
    title: Any
    button: Any
    states: Sequence[str]
    consequences: Sequence[Any]
    logged: Any
    done: Any
    settle: Callable[..., None]
    place: str

    def fits(self, message: Any) -> bool:
        """Whether the message is in a state that it can be done in."""
        return message.state in self.states


INBOX: Final = (
    Settlement(
        "retry",
        _("Retry messages"),
        _("Retry"),
        settling.RETRIED,
        (
            _("The message is handled again as soon as a process looks at the inbox."),
            _(
                "It is a further attempt at the same operation: steps that are stored are not done "
                "again, and keys that were derived for other services are the same."
            ),
            _("If it fails again, it is parked again."),
        ),
        _("Retried."),
        _("handled again soon."),
        settling.retry,
        "source",
    ),
    Settlement(
        "reprocess",
        _("Reprocess messages"),
        _("Reprocess"),
        settling.REPROCESSED,
        (
            _("The handler is called again, from the beginning, although it has succeeded before."),
            _("What it has written to the database stays, and is written a second time."),
            _(
                "Keys that it derives for other services are the same, so that they recognise what "
                "they have done."
            ),
        ),
        _("Reprocessed."),
        _("handled again soon."),
        settling.reprocess,
        "source",
    ),
    Settlement(
        "accept",
        _("Accept messages"),
        _("Accept"),
        settling.ACCEPTED,
        (
            _(
                "Another body came under the same id before, or the same body under another id, "
                "which the signature does not cover: find out from the sender whether both are "
                "genuine."
            ),
            _("The message is handled like any other then."),
        ),
        _("Accepted."),
        _("handled again soon."),
        settling.accept,
        "source",
    ),
)


def _one_of_the_outbox(settle: Callable[[QuerySet[OutboxMessage]], Sized | int]) -> Any:
    """What settles a message of the outbox by its primary key."""

    def settle_one(pk: int, **_: str) -> None:
        rows = OutboxMessage.objects.using(database()).filter(pk=pk)
        if not settle(rows):
            raise NotSettled("Its state has changed, so there is nothing to do. Look at it again.")

    return settle_one


OUTBOX: Final = (
    Settlement(
        "retry",
        _("Retry blocked messages"),
        _("Retry"),
        (OutboxState.BLOCKED,),
        (
            _("The message is sent under its old id, with all its attempts before it."),
            _("Its group goes on after it. If the broker refuses it again, it is blocked again."),
        ),
        _("Retried; it is sent under its old id."),
        _("sent soon."),
        _one_of_the_outbox(outbox.retry),
        "topic",
    ),
    Settlement(
        "skip",
        _("Skip blocked messages"),
        _("Skip"),
        (OutboxState.BLOCKED,),
        (
            _("The message is never sent, and its group goes on without it."),
            _("Until it is purged, it can be sent again, after what was sent meanwhile."),
        ),
        _("Skipped; its group goes on without it."),
        _("skipped."),
        _one_of_the_outbox(outbox.skip),
        "topic",
    ),
    Settlement(
        "resend",
        _("Send again, under new ids"),
        _("Send again"),
        (OutboxState.SENT, OutboxState.SKIPPED),
        (
            _("A copy is sent under a new id: consumers handle it once more."),
            _("In its group, it comes after what was published since."),
        ),
        _("Sent again, under a new id."),
        _("sent again soon."),
        _one_of_the_outbox(outbox.resend),
        "topic",
    ),
)
