"""How far a partition is handled: what was fetched, what is acknowledged, what waits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Partition:
    """A partition that is assigned to this process.

    Attributes:
        doubtful: how many of the next messages the process before us may have begun.
        following: the offset after the last one that was fetched.
        open: the offsets that were fetched, and not acknowledged.
        resumes: when to fetch again, after a failure.
    """

    doubtful: int
    following: int | None = None
    open: set[int] = field(default_factory=set)
    resumes: float | None = None

    def fetched(self, offset: int) -> bool:
        """Note that a message was fetched; whether it may have been delivered before."""
        self.following = offset + 1
        self.open.add(offset)
        self.doubtful -= 1
        return self.doubtful >= 0

    def postponed(self, offset: int, until: float) -> None:
        """Note that this message, and all after it, are to be fetched again."""
        self.open = {other for other in self.open if other < offset}
        self.following = min(offset, offset if self.following is None else self.following)
        self.resumes = max(until, self.resumes or until)
