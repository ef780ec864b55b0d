"""What the reference app tells somebody who has just started it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from testproject.server import running

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(shutil.which("curl") is None, reason="the greeting is for people with curl")
def test_greeting(tmp_path: Path) -> None:
    """The server prints a command; sent twice it charges once; the page ``/`` lists what exists."""
    database = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    with running(tmp_path / "log", DATABASE_URL=database, WORKERS="1") as url:
        page = httpx.get(url)
        commands = re.findall(r"curl .+", (tmp_path / "log").read_text())
        assert len(commands) == 1
        first, again = (_shown(commands[0]) for _ in range(2))
        assert first.startswith("HTTP/1.1 201")
        assert "Idempotent-Replayed" not in first
        assert "Idempotent-Replayed: true" in again
        charge, slow, invoice, change = re.findall(r"curl -i .+", page.text)
        assert charge != commands[0]
        assert "Idempotent-Replayed" not in _shown(charge)
        assert _shown(slow).startswith("HTTP/1.1 201")  # SIMULATE is off: it does not take long
        (count,) = re.findall(r"curl '.+'", page.text)
        assert _shown(count) == '{"count": 1, "kinds": {"charge": 1}}'
        [number] = re.findall(r"^Location: /api/invoices/(\d+)/", _shown(invoice), re.MULTILINE)
        changed = _shown(change.replace("/ID/", f"/{number}/"))
        assert changed.startswith("HTTP/1.1 200")
        assert 'ETag: "2"' in changed
        for path in re.findall(r"^  (/\S+) ", page.text, re.MULTILINE):
            assert httpx.post(f"{url}{path}").status_code in (400, 401), path


def _shown(command: str) -> str:
    """What a command writes to the terminal."""
    arguments = [*shlex.split(command), "--silent"]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout
