"""``--idempotency-replay`` over the suite of a project: no false alarm, and no bug gets away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SUITE = "tests/testing/replayed/suite.py"


def run(folder: Path, *options: str, mutated: bool = False) -> str:
    """Run the project's suite in a process of its own; return what pytest says."""
    program = [sys.executable, "-m", "pytest", SUITE, "-c", os.devnull, f"--rootdir={ROOT}"]
    program += ["-p", "no:cacheprovider", "--ds=tests.testing.replayed.settings", "-q", "-rfE"]
    program += options
    variables = {
        "REPLAYED_DATABASE": str(folder / "db.sqlite3"),
        "MUTATED": "1" if mutated else "0",
        "COLUMNS": "200",
        "PYTHONPATH": str(ROOT),
    }
    environment = {**os.environ, **variables}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    ended = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    return ended.stdout + ended.stderr


def failed(said: str) -> set[str]:
    """The names of the tests that failed."""
    return set(re.findall(rf"^FAILED {SUITE}::(\S+)", said, re.MULTILINE))


def test_no_false_alarm(tmp_path: Path) -> None:
    """The suite passes as before. Requests in races and to a live server are sent once."""
    said = run(tmp_path, "--idempotency-replay")
    assert failed(said) == set(), said
    assert "sent twice: 16; findings: 0" in said, said


def test_mutants(tmp_path: Path) -> None:
    """Each bug fails a test that passes without the option."""
    said = run(tmp_path, "--idempotency-replay", mutated=True)
    assert failed(said) == {
        "ChargeTests::test_create",  # nothing protects it
        "test_race",  # the look-up is locked, but not the execution
        "test_crash",  # the look-up is outside of the transaction
        "test_invoice",  # on_commit() twice
        "test_invoice_commits",
    }, said
    assert f"ERROR {SUITE}::test_teardown" in said, said
    found = re.findall(rf" of {SUITE}::(\S+) was sent again", said)
    assert set(found) == {
        "ChargeTests::test_create",
        "test_invoice",
        "test_invoice_commits",
        "test_teardown",
    }, said
    assert f"findings: {len(set(found))}" in said, said
    for finding in (
        f"POST /charges/ of {SUITE}::ChargeTests::test_create was sent again, and had an effect:",
        '    INSERT INTO "shop_charge" ("reference", "amount") VALUES',
        "Nothing protects this endpoint",
        "    on_commit hook tests.testing.replayed.views.InvoiceView.send",
    ):
        assert finding in said, said
