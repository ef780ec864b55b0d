"""A worker process of an application, which does what a test tells it to, one line at a time.

Each line is ``{"do": name, …}`` and gets one line back, behind what a view tells meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client

from idempotency_django.models import IdempotencyKey
from tests.faults import late_views
from tests.models import Effect

client = Client(raise_request_exception=False)


def post(path: str, key: str, fault: str = "", *, by: Client = client) -> dict[str, Any]:
    """Send a request under a key, and say what the response was."""
    late_views.seen.clear()
    headers = {"Idempotency-Key": key} | ({"X-Fault": fault} if fault else {})
    response = by.post(path, {"key": key}, content_type="application/json", headers=headers)
    return {
        "status": response.status_code,
        "body": response.content.decode(errors="replace"),
        "replayed": response.headers.get("Idempotent-Replayed") == "true",
        "seen": dict(late_views.seen),
    }


def clock() -> dict[str, Any]:
    """What time it is here."""
    return {"time": time.time(), "monotonic": time.monotonic()}


def command(*arguments: str, **options: Any) -> dict[str, Any]:
    """Run a management command, and say what it said."""
    out = StringIO()
    try:
        call_command(*arguments, stdout=out, stderr=out, **options)
    except CommandError as error:
        return {"failed": True, "said": f"{out.getvalue()}{error}"}
    return {"failed": False, "said": out.getvalue()}


def traffic(
    path: str,
    keys: list[str],
    seconds: float,
    threads: int,
    failures: float = 0,
    pause: float = 0,
) -> dict[str, Any]:
    """Send requests under these keys, again and again, and count the responses.

    Some of them, that fraction, are to fail; their responses count as ``failed``. Each thread
    pauses for so many seconds before it sends the next one.
    """
    until = time.monotonic() + seconds

    def send(seed: int) -> Counter[str]:
        chance, by = random.Random(seed), Client(raise_request_exception=False)
        said: Counter[str] = Counter()
        try:
            while time.monotonic() < until:
                fault = "fail:after" if chance.random() < failures else ""
                response = post(path, chance.choice(keys), fault, by=by)
                asked_for = fault and response["status"] == 500
                said["failed" if asked_for else str(response["status"])] += 1
                if response["replayed"]:
                    said["replayed"] += 1
                time.sleep(pause)
        finally:
            connections.close_all()
        return said

    with ThreadPoolExecutor(threads) as pool:
        seeds = [os.getpid() * 100 + number for number in range(threads)]
        return dict(sum(pool.map(send, seeds), Counter()))


def purge(seconds: float) -> dict[str, Any]:
    """Purge in a loop, in batches of a few records."""
    until, rounds, purged = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        said = command("purge_idempotency_keys", "--batch-size", "7")
        assert not said["failed"], said
        rounds, purged = rounds + 1, purged + int(said["said"].split()[1].replace(",", ""))
    return {"rounds": rounds, "purged": purged}


def read(reference: str) -> dict[str, Any]:
    """What the application sees of the effects, and of the records, where its router reads."""
    return {
        "database": Effect.objects.db,
        "effects": Effect.objects.filter(reference=reference).count(),
        "records": IdempotencyKey.objects.filter(key=reference).count(),
    }


DOES = {each.__name__: each for each in (post, clock, command, traffic, purge, read)}


def main() -> None:
    """Do what is asked until nobody asks any more."""
    late_views.tell(ready=os.getpid())
    while line := sys.stdin.readline():
        asked = json.loads(line)
        arguments = asked.pop("arguments", ())
        late_views.tell(response=DOES[asked.pop("do")](*arguments, **asked))
    connections.close_all()
