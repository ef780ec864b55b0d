"""How PostgreSQL executes a statement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from django.db import connections, transaction


def nodes(alias: str, statement: str) -> list[dict[str, Any]]:
    """The nodes of the plan by which the statement was executed; it is rolled back."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        plan = cursor.fetchone()[0]
        transaction.set_rollback(True, using=alias)
    return list(_nodes_of((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))


def rows_read(alias: str, statement: str) -> int:
    """The most rows that any step of the statement had to look at."""
    return max(
        int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        for node in nodes(alias, statement)
    )


def _nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from _nodes_of(below)
