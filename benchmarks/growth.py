"""What changes when the table grows, how fast it is purged, and how large its rows are.

Each table is a copy of the real one in a schema of its own; ``search_path`` says which one the
requests meet. Its rows are copies of a record that a real request left behind.
"""

# the page says × and –
from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import Final

from django.db import connection

from benchmarks.project import MIXIN, new_key
from benchmarks.report import Section, Table, Target
from benchmarks.subjects import view
from benchmarks.timing import Block, Sample, interleave
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.purging import BATCH_SIZE

SMALL: Final = 10_000
TABLE: Final = IdempotencyKey._meta.db_table

GROWTH: Final = """\
First requests and replays of random records, with few and with many records in the table:
{rounds} interleaved rounds of {requests} requests; the ratio compares the two tables."""

PURGE: Final = """\
`DatabaseStore.purge()` deleted {expired:,} expired rows in {batches} batches of its
default size: **{rate:,.0f} rows/s**."""

SIZE: Final = """\
A row that keeps the response of this view (some 70 bytes of JSON) takes, freshly vacuumed:"""

# Keys in random order and times in order, as clients and time make them. A fingerprint is good for
# its own key only: so the records that are replayed are real ones, spread evenly.
_FILL: Final = """
    INSERT INTO {schema}.{table} ({columns}, key, fingerprint, created_at, completed_at, expires_at,
        purge_at)
    SELECT {columns}, COALESCE(own.key, gen_random_uuid()::text),
        COALESCE(own.fingerprint, record.fingerprint), at, at, at + %(ttl)s, at + %(ttl)s
    FROM (SELECT * FROM public.{table} WHERE key = %(record)s) AS record,
    LATERAL (
        SELECT n, now() - interval '1 day' * (1 - n / %(rows)s::float) AS at
        FROM generate_series(1, %(rows)s) AS n
    ) AS times
    LEFT JOIN (
        SELECT key AS key, fingerprint AS fingerprint,
            row_number() OVER (ORDER BY key) * (%(rows)s / %(count)s) AS place
        FROM public.{table} WHERE key = ANY(%(own)s)
    ) AS own ON own.place = n
    ORDER BY n
"""
_FILLED_IN: Final = {
    "id",
    "key",
    "fingerprint",
    "created_at",
    "completed_at",
    "expires_at",
    "purge_at",
}


def measure(rows: int, expired: int, rounds: int, requests: int) -> Section:
    post = view(MIXIN)
    real = [new_key() for _ in range(requests * (rounds + 1))]
    for key in real:
        post(key)
    _create("small", SMALL, "1 day", real)
    _create("large", rows, "1 day", real)
    _create("expired", expired, "-1 second", real)
    sizes = {SMALL: "small", rows: "large"}
    growth, targets = _growth(sizes, real, rounds, requests)
    rate, batches = _purge(expired)
    per_row = Table(["", "bytes per row"])
    for name, size in _sizes("large"):
        per_row.add(name, round(size / rows))
    targets.append(Target(f"purge ≥ 100,000 rows/s: {rate:,.0f}", rate >= 100_000))
    purge = PURGE.format(expired=expired, batches=batches, rate=rate)
    grow = GROWTH.format(rounds=rounds, requests=requests)
    parts = [grow, growth, purge]
    return Section("Growth and purge", parts, targets, details=[SIZE, per_row])


def _create(schema: str, rows: int, ttl: str, real: Sequence[str]) -> None:
    """A table of copies of a record; and these records, so that they can be replayed."""
    fields = IdempotencyKey._meta.concrete_fields
    columns = ", ".join(f.column for f in fields if f.column not in _FILLED_IN)
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {schema}")
        cursor.execute(f"CREATE TABLE {schema}.{TABLE} (LIKE public.{TABLE} INCLUDING ALL)")
        fill = _FILL.format(schema=schema, table=TABLE, columns=columns)
        values = {"rows": rows, "ttl": ttl, "record": real[0], "own": real, "count": len(real)}
        cursor.execute(fill, values)
        cursor.execute(f"VACUUM ANALYZE {schema}.{TABLE}")
        cursor.execute("CHECKPOINT")


def _use(schema: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET search_path = {schema}, public")


def _growth(
    sizes: dict[int, str], real: Sequence[str], rounds: int, requests: int
) -> tuple[Table, list[Target]]:
    post = view(MIXIN)

    def block(size: int, new: bool) -> Block:
        replayed = iter(random.sample(real, len(real)))

        def run() -> list[Sample]:
            _use(sizes[size])
            keys = iter(new_key, None) if new else replayed
            return [post(key) for key in islice(keys, requests)]

        return run

    kinds = {"first": True, "replay": False}
    blocks = {f"{kind} {n}": block(n, new) for kind, new in kinds.items() for n in sizes}
    series = {name: measured.wall for name, measured in interleave(blocks, rounds).items()}
    _use("public")

    small, large = sizes
    table = Table(["request", f"{small:,} rows", f"{large:,} rows", "ratio (range)"])
    targets = []
    for kind in kinds:
        few, many = series[f"{kind} {small}"], series[f"{kind} {large}"]
        ratio = many.over(few)
        table.add(kind, f"{few.milliseconds:.2f} ms", f"{many.milliseconds:.2f} ms", ratio)
        text = f"{kind} request with {large:,} rows ≤ 1.15 × with {small:,}: {ratio.value:.2f}"
        targets.append(Target(text, ratio.value <= 1.15))
    return table, targets


def _purge(rows: int) -> tuple[float, int]:
    """Purge all of ``expired``; return the rows per second and the number of batches."""
    _use("expired")
    deleted = batches = 0
    started = time.perf_counter()
    store = DatabaseStore("default")
    while count := store.purge(timedelta(0), BATCH_SIZE):
        deleted += count
        batches += 1
    seconds = time.perf_counter() - started
    assert deleted == rows, (deleted, rows)
    _use("public")
    return deleted / seconds, batches


def _sizes(schema: str) -> list[tuple[str, int]]:
    """The bytes of the table and of each index, the largest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_get_indexdef(indexrelid), pg_relation_size(indexrelid) FROM pg_index "
            "WHERE indrelid = %(table)s::regclass UNION ALL SELECT '', pg_table_size(%(table)s)",
            {"table": f"{schema}.{TABLE}"},
        )
        sizes = [(_columns(definition), size) for definition, size in cursor]
    return [*sorted(sizes, key=lambda row: -row[1]), ("all of it", sum(size for _, size in sizes))]


def _columns(definition: str) -> str:
    columns = re.search(r"\((.+?)\)", definition)
    return f"index on {columns[1]}" if columns else "table"
