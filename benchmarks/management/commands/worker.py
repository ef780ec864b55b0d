"""A process in which variants are measured, as far from its servers as their URLs say."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, Final

from django.core.management import BaseCommand
from django.db import connection
from django_redis import get_redis_connection

from benchmarks.models import Order
from benchmarks.subjects import CALLS, Subject

PROBES: Final = 100  # round trips


class Command(BaseCommand):
    help = (
        "Reads requests, one line of JSON each, and replies to each with a line: what each call of "
        "a block took, what the least round trips take, or what the database has counted so far."
    )
    requires_system_checks = ()

    def handle(self, **_: Any) -> None:
        subjects = cache(lambda of, variant: Subject(CALLS[of](variant)))
        while line := sys.stdin.readline():
            match json.loads(line):
                case {"of": of, "variant": variant, "kind": "first", "calls": calls}:
                    self._say(list(subjects(of, variant).first(calls)()))
                case {"of": of, "variant": variant}:
                    self._say(list(subjects(of, variant).replays()))
                case "probe":
                    self._say([_round_trip(_ask_database), _round_trip(_ask_redis)])
                case "state":
                    self._say({"orders": Order.objects.count(), "commits": _commits()})

    def _say(self, value: object) -> None:
        self.stdout.write(json.dumps(value))
        self.stdout.flush()


def _round_trip(ask: Callable[[], object]) -> float:
    """The seconds that one takes."""
    times = []
    for _ in range(PROBES):
        started = time.perf_counter()
        ask()
        times.append(time.perf_counter() - started)
    return median(times)


def _ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _ask_redis() -> None:
    get_redis_connection().ping()


def _commits() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        )
        return int(cursor.fetchone()[0])
