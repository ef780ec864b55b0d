"""Exponential backoff for all retries of the package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_LARGEST_POWER = 32  # 2 ** 32 times any first wait is longer than any longest one

_LONGEST_SECONDS = 10**9  # longer than any wait


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double after each failure in a row, up to the longest.

    Attributes:
        first: the wait after the first failure.
        longest: no wait is longer.

    Raises:
        TypeError: one of them is not a timedelta.
    """

    first: timedelta
    longest: timedelta

    def __post_init__(self) -> None:
        if not (isinstance(self.first, timedelta) and isinstance(self.longest, timedelta)):
            raise TypeError(f"{self} has a wait that is not a timedelta. Pass two timedeltas.")

    def after(self, failures: int) -> timedelta:
        """The wait after this number of failures in a row, without jitter."""
        power = min(failures - 1, _LARGEST_POWER)
        seconds = self.first.total_seconds() * 2.0**power
        return timedelta(seconds=min(seconds, self.longest.total_seconds()))

    def jittered(self, failures: int) -> timedelta:
        """The same, shortened at random by up to a half, so that not all try again at once."""
        return self.after(failures) * random.uniform(0.5, 1)  # noqa: S311  # no secret


def retry_after(value: str) -> timedelta:
    """The time that a header ``Retry-After`` asks for; 0 if it says nothing that can be understood.

    Args:
        value: seconds, or an HTTP date.
    """
    try:
        seconds = float(int(value[:20]))
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return timedelta(0)
    return timedelta(seconds=min(max(seconds, 0.0), _LONGEST_SECONDS))
