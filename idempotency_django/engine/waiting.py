"""How a duplicate waits for the execution that is in progress."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from .outcomes import InProgress, Outcome

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.25
"""Seconds between two looks at an operation while waiting; they grow from first to longest."""


class ConflictWait:
    """How long to wait for an operation in progress, and how often to look.

    Args:
        longest: how long, from now; ``None``: not at all.
    """

    def __init__(self, longest: timedelta | None) -> None:
        self._deadline = time.monotonic() + longest.total_seconds() if longest else 0.0
        self._pause = FIRST_PAUSE

    def pause(self, outcome: Outcome) -> float | None:
        """Seconds until the next look; ``None``: the outcome stands, or the wait is over."""
        if not isinstance(outcome, InProgress):
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        pause = self._pause * random.uniform(0.5, 1)  # noqa: S311  # not a secret
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return min(pause, left)

    async def last(
        self,
        look: Callable[[], Awaitable[Outcome]],
        pause: Callable[[float], Awaitable[None]],
    ) -> Outcome:
        """What the last look finds: when nobody else is executing, or the wait is over."""
        while True:
            outcome = await look()
            seconds = self.pause(outcome)
            if seconds is None:
                return outcome
            await pause(seconds)
