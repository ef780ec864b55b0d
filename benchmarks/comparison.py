"""Variants of one thing, compared in time, at two distances, and in what they send."""

# the page says × and –
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.report import Table, Target
from benchmarks.site import DISTANCES, FAR, LOCAL, ROUND_TRIP, Counts, Site
from benchmarks.timing import Block, Measured, Series, interleave

AWAY: Final = f"{ROUND_TRIP * 1000:g} ms away"
PLACES: Final = {LOCAL: "local", FAR: AWAY}

Names = Mapping[str, Measured]
"""What was measured, by ``"variant kind"``."""


@dataclass(frozen=True)
class Limit:
    """The multiple of another one that something is to take at most."""

    text: str
    name: str
    factor: float
    base: str
    distance: str = LOCAL

    def target(self, comparison: Comparison) -> Target:
        value = round(comparison.ratio(self.name, self.base, self.distance), 2)
        return Target(f"{self.text}: {value:.2f}", value <= self.factor)


@dataclass(frozen=True)
class Comparison:
    """What was measured at each distance, and what one call of each name makes."""

    labels: Mapping[str, str]
    bare: str
    measured: Mapping[str, Names]
    counts: Mapping[str, Counts]

    def wall(self, name: str, distance: str = LOCAL) -> Series:
        return self.measured[distance][name].wall

    def cpu(self, name: str) -> Series:
        return self.measured[LOCAL][name].cpu

    def ratio(self, name: str, base: str, distance: str = LOCAL) -> float:
        return self.wall(name, distance).over(self.wall(base, distance)).value

    def times(self, thing: str, without: Collection[str] = ()) -> Table:
        """Medians and their ratios to the bare one; ``thing`` is what is called."""
        table = Table(["", thing])
        for place in PLACES.values():
            table.head(place, "× bare (range)")
        for name in self.counts:
            if name in without:
                continue
            cells = [
                cell
                for distance in DISTANCES
                for cell in self._beside(self.wall(name, distance), self.wall(self.bare, distance))
            ]
            table.add(*self._title(name), *cells)
        return table

    def efforts(self, thing: str) -> Table:
        """What one call takes of the processor, and sends; ``thing`` is what is called."""
        table = Table(["", thing, "CPU", "× bare (range)"])
        table.head("messages (bytes) to PostgreSQL", "commits", "messages (bytes) to Redis")
        for name, one in self.counts.items():
            database, redis = (
                f"{sent.messages:.0f} ({sent.bytes:,.0f})" for sent in (one.database, one.redis)
            )
            cells = [*self._beside(self.cpu(name), self.cpu(self.bare))]
            table.add(*self._title(name), *cells, database, f"{one.commits:.0f}", redis)
        return table

    def _beside(self, series: Series, base: Series) -> tuple[str, str]:
        ratio = "1.00" if series is base else str(series.over(base))
        return f"{series.milliseconds:.2f} ms", ratio

    def _title(self, name: str) -> tuple[str, str]:
        variant, kind = name.split()
        return self.labels[variant], kind


def compare(
    site: Site,
    of: str,
    labels: Mapping[str, str],
    unprotected: Collection[str],
    rounds: int,
    calls: int,
) -> Comparison:
    """Measure all variants of a thing in the same rounds; the first one is the bare one."""
    names = {
        f"{variant} {kind}": (variant, kind)
        for variant in labels
        for kind in (("first",) if variant in unprotected else ("first", "replay"))
    }
    blocks: dict[str, Block] = {
        f"{distance} {name}": site.block(distance, of, variant, kind, calls)
        for distance in DISTANCES
        for name, (variant, kind) in names.items()
    }
    series = interleave(blocks, rounds)
    measured = {
        distance: {name: series[f"{distance} {name}"] for name in names} for distance in DISTANCES
    }
    counts = {name: site.counts(of, variant, kind) for name, (variant, kind) in names.items()}
    return Comparison(labels, next(iter(names)), measured, counts)
