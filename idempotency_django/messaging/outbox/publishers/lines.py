"""The order of what is published: one line of messages for each group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .base import Outgoing, away


class Lines:
    """What one call of :meth:`~.base.Publisher.publish` is to send, and what has become of it.

    The messages of a group stand in one line, and only the first of them may be under way. A
    message without a group has a line of its own.

    Args:
        messages: what to send.
    """

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.messages = messages
        self.answers: list[Exception | None] = [None] * len(messages)
        self._lines: dict[str | int, deque[int]] = {}
        for place, message in enumerate(messages):
            self._lines.setdefault(message.group or place, deque()).append(place)

    @property
    def heads(self) -> list[int]:
        """The places of the messages that may be sent now."""
        return [line[0] for line in self._lines.values()]

    def confirm(self, place: int) -> int | None:
        """The broker has the message there; the place of the next one of its line, if there is one.

        Args:
            place: of the first message of a line.
        """
        line = self._lines[self._name(place)]
        line.popleft()
        if line:
            return line[0]
        del self._lines[self._name(place)]
        return None

    def fail(self, place: int, error: Exception) -> None:
        """The message there is not sent, and none after it.

        Args:
            place: of the first message of a line.
            error: what is wrong with it.
        """
        for waiting in self._lines.pop(self._name(place)):
            self.answers[waiting] = error

    def give_up(self, error: Exception) -> None:
        """The broker is away: nothing more is sent, for now."""
        for place in self.heads:
            self.fail(place, away(error))

    def _name(self, place: int) -> str | int:
        return self.messages[place].group or place
