"""The reference app as a newcomer meets it: the server as it starts, and the demo."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from idempotency_django.testing import eventually
from testproject.server import ROOT, running

from .clients import TRANSFERS, UNPROTECTED, Api, Order

pytestmark = pytest.mark.e2e


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testproject.demo", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, encoding="utf-8", timeout=280
    )


@pytest.mark.nightly
def test_the_demo_succeeds() -> None:
    """Where every response and count is right, the demo says so and ends with 0."""
    run = demo()

    assert run.returncode == 0, run.stderr
    assert "Everything came out as expected." in run.stdout
    assert "WRONG" not in run.stdout
    assert run.stderr == ""
    scenes, _ = run.stdout.split("What the operator sees")
    assert all(len(line) <= 80 for line in scenes.splitlines())


@pytest.mark.nightly
def test_the_demo_fails_where_a_count_is_wrong() -> None:
    """Shown an endpoint without protection, the demo says what is wrong and ends with 1."""
    run = demo(UNPROTECTED)

    assert run.returncode == 1, run.stderr
    assert "WRONG" in run.stdout


@pytest.mark.nightly
def test_the_server_brings_a_ledger_that_ends_with_it(tmp_path: Path) -> None:
    """Where no ledger is named, transfers are booked in one that lives as long as the server."""
    database, log, order = f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path / "log", Order()
    with (
        running(log, DATABASE_URL=database, LEDGER_URL="", WORKERS="1") as url,
        closing(Api(url)) as api,
    ):
        assert api.send(TRANSFERS, order).status_code == 201
        (ledger_url,) = re.findall(r"Ledger: (\S+) ", log.read_text())
        asked = {"reference": order.reference}
        told = httpx.get(f"{ledger_url}/calls", params=asked).json()
        assert told == {"calls": 1, "effects": 1}

    def has_ended() -> bool:
        try:
            httpx.get(ledger_url)
        except httpx.TransportError:
            return True
        return False

    eventually(has_ended)
