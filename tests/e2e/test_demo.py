"""The reference app as a newcomer meets it: the demo."""

from __future__ import annotations

import subprocess
import sys

import pytest

from testproject.server import ROOT

from .clients import UNPROTECTED

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
