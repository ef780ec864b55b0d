"""What the page opens with: a paragraph and a chart for those who know nothing of it yet."""

# the page says ×
from __future__ import annotations

from typing import Final

from benchmarks.chart import Chart, Row
from benchmarks.comparison import AWAY, Comparison
from benchmarks.project import CACHED, LEASED, OTHER, REDIS
from benchmarks.report import Opening
from benchmarks.site import DISTANCES
from benchmarks.targets import ATOMIC_FIRST, FIRST, REPLAY

TEXT: Final = """\
The first request of a protected view takes **{first[local]:.2f} ×** as long as the same view in
`transaction.atomic()` if PostgreSQL runs on the same machine, and
**{first[far]:.2f} ×** as long if it is {away}, as from one machine to another.
A retry gets the stored response without running the view, and takes **{replay[local]:.2f} ×** and
**{replay[far]:.2f} ×** as long. The first request costs the application {cpu:.2f} × the processor
time.

The view belongs to Django REST framework, and creates one row. In the chart, the view in
`transaction.atomic()` takes 1."""

TITLE: Final = "Time of a request, as a multiple of the unprotected view's"
SERIES: Final = ("servers on the same machine", f"servers {AWAY}")
GROUPS: Final = {
    "The first request": {
        ATOMIC_FIRST: "unprotected, in atomic()",
        FIRST: "IdempotentViewMixin",
        f"{LEASED} first": 'IdempotentViewMixin, mode="leased"',
        f"{REDIS} first": "IdempotentViewMixin on RedisStore",
        f"{CACHED} first": "IdempotentViewMixin on CachedStore",
        f"{OTHER} first": "django-idempotency-key on Redis",
    },
    "A retry": {
        REPLAY: "IdempotentViewMixin",
        f"{REDIS} replay": "IdempotentViewMixin on RedisStore",
        f"{CACHED} replay": "IdempotentViewMixin on CachedStore",
        f"{OTHER} replay": "django-idempotency-key on Redis",
    },
}


def opening(comparison: Comparison) -> Opening:
    def ratios(name: str) -> dict[str, float]:
        return {place: comparison.ratio(name, ATOMIC_FIRST, place) for place in DISTANCES}

    text = TEXT.format(
        first=ratios(FIRST),
        replay=ratios(REPLAY),
        away=AWAY,
        cpu=comparison.cpu(FIRST).over(comparison.cpu(ATOMIC_FIRST)).value,
    )
    groups = [
        (heading, [Row(label, _bars(comparison, name)) for name, label in names.items()])
        for heading, names in GROUPS.items()
    ]
    chart = Chart(TITLE, SERIES, groups)
    return Opening(text, chart.svg(), chart.words())


def _bars(comparison: Comparison, name: str) -> list[float]:
    return [comparison.ratio(name, ATOMIC_FIRST, distance) for distance in DISTANCES]
