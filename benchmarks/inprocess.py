"""The variants in one process, behind the WSGI interface."""

# the page says × and –
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Final
from unittest import mock

from django.core.handlers.wsgi import WSGIHandler
from django.db import connection
from redis.connection import AbstractConnection

from benchmarks.models import Order
from benchmarks.project import (
    ATOMIC,
    BARE,
    CACHED,
    LABELS,
    LEASED,
    MEMORY,
    MIXIN,
    OTHER,
    REDIS,
    application,
    new_key,
    order,
)
from benchmarks.report import Section, Table
from benchmarks.timing import Block, Series, interleave

COUNTED_OVER: Final = 25  # requests

TEXT: Final = """\
{rounds} interleaved rounds of {requests} requests each; the ratio is the median of the rounds'
ratios to the bare view. The middleware is `startproject`'s, connections persist, and authentication
costs nothing. Statements are the application's own, without BEGIN and COMMIT. Commits are
PostgreSQL's `xact_commit`, including those that wrote nothing. The last column counts the messages
that are sent to Redis."""

PARTS: Final = """\
The first request costs {added:.2f} ms more than the bare view: {transaction:.2f} ms for BEGIN and
COMMIT, which a view that writes in a transaction pays anyway; {python:.2f} ms for this package's
own Python, found by running it on `MemoryStore`; {statements:.2f} ms for the claim, the stored
answer and the longer COMMIT."""


class Target:
    """A variant's application, and the keys of its latest first requests."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.keys: Sequence[str] = ()
        self._application = application(variant)

    def first(self, requests: int) -> Block:
        """A block of requests with new keys."""

        def block() -> Iterator[float]:
            self.keys = [new_key() for _ in range(requests)]
            return map(self.post, self.keys)

        return block

    def replays(self) -> Iterator[float]:
        """A block that repeats the first requests."""
        return map(self.post, self.keys)

    def post(self, key: str) -> float:
        """Send one request, expect a 201, and return the seconds it took."""
        return call(self._application, f"/{self.variant}/", key)


def call(app: WSGIHandler, path: str, key: str) -> float:
    body = order()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_ACCEPT": "application/json",
        "HTTP_HOST": "localhost",
        "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
        "wsgi.input": BytesIO(body),
        "wsgi.url_scheme": "http",
    }
    statuses: list[str] = []
    started = time.perf_counter()
    response = app(environ, lambda status, headers: statuses.append(status))
    answer = b"".join(response)
    response.close()
    seconds = time.perf_counter() - started
    assert statuses == ["201 Created"], (path, statuses, answer)
    return seconds


def measure(rounds: int, requests: int) -> Section:
    targets = {variant: Target(variant) for variant in LABELS}
    blocks: dict[str, Block] = {}
    for variant, target in targets.items():
        blocks[f"{variant} first"] = target.first(requests)
        if variant not in (BARE, ATOMIC):
            blocks[f"{variant} replay"] = target.replays
    series = interleave(blocks, rounds)
    table = Table(["", "request", "median", "× bare (range)", "statements", "commits", "Redis"])
    for name, one in series.items():
        variant, kind = name.split()
        ratio = "1.00" if variant == BARE else one.over(series[f"{BARE} first"])
        counts = per_request(targets[variant], kind)
        table.add(LABELS[variant], kind, f"{one.milliseconds:.2f} ms", ratio, *counts)
    text = TEXT.format(rounds=rounds, requests=requests)
    return Section("In process", [text, table, _parts(series)], _targets(series))


def _parts(series: dict[str, Series]) -> str:
    bare, atomic, memory, mixin = (
        series[f"{variant} first"].milliseconds for variant in (BARE, ATOMIC, MEMORY, MIXIN)
    )
    added, transaction, python = mixin - bare, atomic - bare, memory - bare
    statements = added - transaction - python
    return PARTS.format(added=added, transaction=transaction, python=python, statements=statements)


def _targets(series: dict[str, Series]) -> list[tuple[str, bool]]:
    bare = series[f"{BARE} first"]
    first, replay, other = (
        series[name].over(bare).value
        for name in (f"{MIXIN} first", f"{MIXIN} replay", f"{OTHER} first")
    )
    leased, redis, cached = (
        series[name].over(bare).value
        for name in (f"{LEASED} first", f"{REDIS} first", f"{CACHED} replay")
    )
    return [
        (f"first request ≤ 1.45 × bare: {first:.2f}", first <= 1.45),
        (f"replay ≤ 0.70 × bare: {replay:.2f}", replay <= 0.70),
        (f"first request ahead of django-idempotency-key's {other:.2f}", first < other),
        (f"leased first request ≤ 1.75 × bare: {leased:.2f}", leased <= 1.75),
        (f"first request on `RedisStore` ≤ 1.30 × bare: {redis:.2f}", redis <= 1.30),
        (f"replay on `CachedStore` ≤ 0.35 × bare: {cached:.2f}", cached <= 0.35),
    ]


def per_request(target: Target, kind: str) -> tuple[str, str, str]:
    """How many statements, commits and round trips to Redis a request of this kind makes."""
    block = target.first(COUNTED_OVER)
    if kind == "replay":
        list(block())
        block = target.replays
    orders = Order.objects.count()
    counts = counted(block)
    executed = Order.objects.count() - orders
    assert executed == (COUNTED_OVER if kind == "first" else 0), (target.variant, kind, executed)
    return counts


def counted(block: Block) -> tuple[str, str, str]:
    """How many statements, commits and round trips to Redis each of ``COUNTED_OVER`` makes."""
    statements = 0

    def count(execute: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal statements
        statements += 1
        return execute(*arguments)

    before = _commits()
    with connection.execute_wrapper(count), round_trips() as trips:
        list(block())
    commits = _commits() - before
    each = [f"{number / COUNTED_OVER:.0f}" for number in (statements, commits, len(trips))]
    return each[0], each[1], each[2]


@contextmanager
def round_trips() -> Iterator[list[None]]:
    """One entry for each time that redis-py, which everybody here uses, sends something."""
    trips: list[None] = []
    send = AbstractConnection.send_packed_command

    def counted(self: AbstractConnection, *arguments: Any, **options: Any) -> Any:
        trips.append(None)
        return send(self, *arguments, **options)

    with mock.patch.object(AbstractConnection, "send_packed_command", counted):
        yield trips


def _commits() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        )
        return int(cursor.fetchone()[0])
