"""The variants of the view in one process, behind the WSGI interface."""

# the page says × and –
from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks import project
from benchmarks.comparison import AWAY, Comparison, compare
from benchmarks.opening import opening
from benchmarks.report import Section, Table
from benchmarks.site import COUNTED_OVER, FAR, LOCAL, ROUND_TRIP, Probe, Site
from benchmarks.targets import LIMITS

TEXT: Final = """\
{rounds} interleaved rounds of {requests} requests each; a ratio is the median of the rounds' ratios
to the bare view. The servers are reached directly (local), or over a relay that delays each
direction by {delay:g} ms ({away}), as from another machine of the same data centre. A `SELECT 1`
took {local_database:.2f} ms locally and {far_database:.2f} ms over the relay."""

NOT_ON_PAGE: Final = {
    f"{project.MEMORY} first",
    f"{project.MEMORY} replay",
    *(f"{variant} replay" for variant in (project.FENCED, project.STEPS)),  # as without them
}

SENT: Final = """\
What one request takes and sends. CPU is the processor time of a local request: of all threads of
the application's process and of the kernel's work for them, but not of the servers. Messages and
bytes are the mean of {counted} requests, counted by the relay. A message is all that the
application sends before it awaits a result, so each costs one round trip. BEGIN and COMMIT are
counted. Commits are PostgreSQL's `xact_commit`, including those that wrote nothing."""

PARTS: Final = """\
What the first request costs more than the bare view, {place}: {added:.2f} ms. BEGIN and COMMIT,
which a view that writes in a transaction pays anyway, are {transaction:.2f} ms of it. This
package's own Python, found by running it on `MemoryStore`, is {python:.2f} ms. The claim, the
stored response and the longer COMMIT are the remaining {statements:.2f} ms."""


def measure(site: Site, rounds: int, requests: int) -> Section:
    probes = site.round_trips()
    unprotected = project.BARE, project.ATOMIC
    comparison = compare(site, "view", project.LABELS, unprotected, rounds, requests)
    return section(comparison, probes, rounds, requests)


def section(
    comparison: Comparison, probes: Mapping[str, Probe], rounds: int, requests: int
) -> Section:
    probed = {
        f"{distance}_{server}": seconds * 1000
        for distance, probe in probes.items()
        for server, seconds in probe._asdict().items()
    }
    delay = ROUND_TRIP / 2 * 1000
    text = TEXT.format(rounds=rounds, requests=requests, delay=delay, away=AWAY, **probed)
    details: list[str | Table] = [
        SENT.format(counted=COUNTED_OVER),
        comparison.efforts("request"),
        _parts(comparison, LOCAL, "locally"),
        _parts(comparison, FAR, AWAY),
    ]
    targets = [limit.target(comparison) for limit in LIMITS]
    parts = [text, comparison.times("request", NOT_ON_PAGE)]
    return Section("In process", parts, targets, opening(comparison), details)


def _parts(comparison: Comparison, distance: str, place: str) -> str:
    bare, atomic, memory, mixin = (
        comparison.wall(f"{variant} first", distance).milliseconds
        for variant in (project.BARE, project.ATOMIC, project.MEMORY, project.MIXIN)
    )
    added, transaction, python = mixin - bare, atomic - bare, memory - bare
    statements = added - transaction - python
    return PARTS.format(
        place=place, added=added, transaction=transaction, python=python, statements=statements
    )
