"""What mypy says of a user's code, with the types that the package ships."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = """\
from idempotency_django import IdempotentRequest, Policy, idempotent
from django.http import HttpResponse


@idempotent(requird=True)
def misspelt(request: IdempotentRequest) -> HttpResponse:
    return HttpResponse(request.idempotency.key)


Policy().replace(ttl=60)


@idempotent(required={"DELETE"}, on_conflict="wait")
def right(request: IdempotentRequest) -> HttpResponse:
    return HttpResponse(request.idempotency.key)
"""


@pytest.mark.nightly
def test_misspelt_option(tmp_path: Path) -> None:
    """A misspelt option is an error, and so is a value of another type; the rest is not."""
    program = tmp_path / "shop.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    lines = {int(line.split(":")[1]) for line in ran.stdout.splitlines() if ": error: " in line}
    assert lines == {5, 10}, ran.stdout + ran.stderr
    assert 'Unexpected keyword argument "requird"' in ran.stdout
    assert 'Argument "ttl" to "replace"' in ran.stdout
