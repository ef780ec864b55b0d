"""What each transport does for the loop, which runs all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from .incoming import Incoming

NO_DEAD_LETTERS: Final = (
    "There is no place for messages that cannot be handled, so they would be lost. Name a {} for "
    "them by dead_letter=, or add 'idempotency_django.messaging' to INSTALLED_APPS, which keeps "
    "them in the database."
)


class Transport(ABC):
    """A connection to one broker. All of it is called by one thread, which runs no handler.

    Attributes:
        name: what it is called in logs.
        lost: the errors that say that the broker cannot be reached, or has sent us away. The loop
            then closes the transport, waits, and opens it again.
    """

    name: ClassVar[str]
    lost: ClassVar[tuple[type[BaseException], ...]]

    @abstractmethod
    def open(self) -> None:
        """Connect to the broker.

        Raises:
            ImproperlyConfigured: there is nothing to read from, and no waiting will help.
        """

    @abstractmethod
    def refuse_loss(self) -> None:
        """Make sure that the broker keeps what :meth:`reject` is called with.

        The loop calls it after :meth:`open`, where no table keeps such messages.

        Raises:
            ImproperlyConfigured: it would lose them.
        """

    @abstractmethod
    def fetch(self, limit: int) -> list[Incoming]:
        """Wait a few seconds for messages.

        Args:
            limit: how many to return at most.
        """

    @abstractmethod
    def beat(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker that these messages are being handled still; called each second."""

    @abstractmethod
    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker to forget these messages: what they asked for is committed."""

    @abstractmethod
    def postpone(self, message: Incoming, seconds: float) -> None:
        """Have this message delivered again after some seconds."""

    @abstractmethod
    def reject(self, message: Incoming, error: Exception) -> None:
        """Have the broker keep this message with those that could not be handled.

        It is not acknowledged before the broker has it there.
        """

    @abstractmethod
    def release(self, messages: Sequence[Incoming]) -> None:
        """Give these messages back: this process ends, and has not handled them."""

    @abstractmethod
    def close(self) -> None:
        """Leave the broker; what was not acknowledged is delivered to somebody else."""
