"""The reference app as a newcomer meets it: the server as it starts, and the demo."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from testproject.server import ROOT, running

from .clients import UNPROTECTED, Api, Order

pytestmark = pytest.mark.e2e


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testproject.demo", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, encoding="utf-8", timeout=120
    )


def test_the_demo_succeeds() -> None:
    """Where every answer and count is right, the demo says so and ends with 0."""
    run = demo()

    assert run.returncode == 0, run.stderr
    assert "All of it is right." in run.stdout
    assert "WRONG" not in run.stdout


def test_the_demo_fails_where_a_count_is_wrong() -> None:
    """Shown an endpoint without protection, the demo says what is wrong and ends with 1."""
    run = demo(UNPROTECTED)

    assert run.returncode == 1, run.stderr
    assert "WRONG" in run.stdout


def test_the_server_starts_again_on_what_it_has_left(tmp_path: Path) -> None:
    """Migrating and seeding once more changes nothing: a retry after a restart is replayed."""
    order, database = Order(), f"sqlite:///{tmp_path / 'db.sqlite3'}"
    answers = []
    for _ in range(2):
        with (
            running(tmp_path / "log", DATABASE_URL=database, WORKERS="1") as url,
            closing(Api(url)) as api,
        ):
            assert api.get("/healthz").text == "ok\n"
            answers.append(api.send("/api/charges/", order))

    first, retry = answers
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.content == first.content


def test_faults_are_simulated_only_where_that_is_switched_on(tmp_path: Path) -> None:
    """Without SIMULATE=1, nobody can kill the server with a header."""
    database, order = f"sqlite:///{tmp_path / 'db.sqlite3'}", Order(fault="kill=before-effect")
    with (
        running(tmp_path / "log", DATABASE_URL=database, SIMULATE="", WORKERS="1") as url,
        closing(Api(url)) as api,
    ):
        assert api.send("/api/charges/", order).status_code == 201


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The caller is not left waiting, and reads the end of the server's log."""
    nowhere = f"sqlite:///{tmp_path / 'missing' / 'db.sqlite3'}"
    with (
        pytest.raises(RuntimeError, match="unable to open database file"),
        running(tmp_path / "log", DATABASE_URL=nowhere),
    ):
        pass


def test_the_admin_is_there(tmp_path: Path) -> None:
    """The admin has its login page and its style sheets, with no web server in front."""
    database = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    with (
        running(tmp_path / "log", DATABASE_URL=database, WORKERS="1") as url,
        closing(Api(url)) as api,
    ):
        assert "csrfmiddlewaretoken" in api.get("/admin/login/").text
        assert api.get("/static/admin/css/base.css").headers["Content-Type"] == "text/css"
