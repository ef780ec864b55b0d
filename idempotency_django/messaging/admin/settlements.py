"""What an operator can do to messages of the inbox, and what is said of it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from ..inbox import settling
from ..models import InboxMessage


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
        settle: does it.
    """

    name: str
    title: Any
    button: Any
    states: Sequence[str]
    consequences: Sequence[Any]
    logged: Any
    settle: Callable[..., None]

    def fits(self, message: InboxMessage) -> bool:
        """Whether the message is in a state that it can be done in."""
        return message.state in self.states


SETTLEMENTS: Final = (
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
        settling.retry,
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
        settling.reprocess,
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
        settling.accept,
    ),
)
