"""Medians over interleaved rounds, and ratios within a round."""

# the page says × and –
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple


class Sample(NamedTuple):
    """What one request took, in seconds: of wall-clock time, and of the application's CPU."""

    wall: float
    cpu: float = 0.0  # not measured


Block = Callable[[], Iterable[Sample]]
"""Runs one block of requests and returns what each took."""


@dataclass
class Series:
    """The median of each round, in seconds."""

    medians: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return median(self.medians) * 1000

    def over(self, base: Series) -> Ratio:
        """This series as a multiple of another one that was measured in the same rounds."""
        ratios = [mine / theirs for mine, theirs in zip(self.medians, base.medians, strict=True)]
        return Ratio(median(ratios), min(ratios), max(ratios))


@dataclass
class Measured:
    """What the requests of one kind took in each round."""

    wall: Series = field(default_factory=Series)
    cpu: Series = field(default_factory=Series)

    def add(self, samples: Iterable[Sample]) -> None:
        wall, cpu = zip(*samples, strict=True)
        self.wall.medians.append(median(wall))
        self.cpu.medians.append(median(cpu))


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, and their range."""

    value: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.lowest:.2f}–{self.highest:.2f})"


def interleave(blocks: Mapping[str, Block], rounds: int) -> dict[str, Measured]:
    """Run every block once per round, so that a slow moment of the machine meets them all.

    A first round warms everything up and is not counted.
    """
    measured = {name: Measured() for name in blocks}
    for count in range(rounds + 1):
        for name, block in blocks.items():
            samples = list(block())
            if count:
                measured[name].add(samples)
    return measured
