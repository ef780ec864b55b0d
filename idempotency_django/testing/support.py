"""What tests of stores need: operations, threads that start together, patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

from django.db import connections

from ..records import Claim, Operation, Payload, Record

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test stops waiting for something that should have happened."""

SECOND = timedelta(seconds=1)
MOMENT = timedelta(milliseconds=1)
ANSWER = Payload(201, (("Content-Type", "text/plain"), ("Location", "/charges/1")), b"\x00\xff one")


def an_operation(**changes: object) -> Operation:
    """An operation with a key of its own."""
    given: dict[str, object] = {
        "key": str(uuid4()),
        "scope": "user:1|POST /charges/",
        "name": "POST /charges/",
        "fingerprint": "f" * 64,
        "ttl": timedelta(hours=1),
        "count_replays": True,
    }
    return Operation(**(given | changes))  # type: ignore[arg-type]  # checked by the dataclass


def in_threads(functions: Iterable[Callable[[], T]]) -> list[T]:
    """Call the functions at the same moment, each in its own thread; their results in order."""
    functions = list(functions)
    barrier = threading.Barrier(len(functions), timeout=PATIENCE)

    def call(function: Callable[[], T]) -> T:
        try:
            barrier.wait()
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(threads.map(call, functions, timeout=PATIENCE * 2))


def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline, pause = time.monotonic() + PATIENCE, 0.001
    while not condition():
        assert time.monotonic() < deadline, "It did not happen."
        time.sleep(pause)
        pause = min(pause * 1.2, 0.02)  # to ask often would slow down what is waited for


def in_words(found: Claim | Record) -> str:
    """What a store said, in words: "in progress"."""
    assert isinstance(found, Record)
    return found.status.replace("_", " ")
