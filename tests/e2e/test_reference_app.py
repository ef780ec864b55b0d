"""The reference app as a newcomer meets it: the server as it starts, and the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from idempotency_django.testing import eventually
from testproject import ledger
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
    assert "All of it is right." in run.stdout
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
@pytest.mark.parametrize("safe_path", ["", "1"], ids=["as ever", "with a safe path"])
@pytest.mark.parametrize(
    ("folder", "called"),
    [
        (".", ["testproject/manage.py"]),
        (".", ["-m", "testproject.manage"]),
        ("testproject", ["manage.py"]),
        ("testproject", ["-m", "manage"]),
        ("testproject/payments", ["../manage.py"]),
        ("/", [str(ROOT / "testproject" / "manage.py")]),
    ],
    ids=["by its path", "as a module", "from its folder", "as a module there", "above", "absolute"],
)
def test_commands_work_however_manage_is_called(
    folder: str, called: list[str], safe_path: str, tmp_path: Path
) -> None:
    """A command of the reference app runs from any folder, by path or as a module."""
    if safe_path and called[0] == "-m":
        pytest.skip("Python itself finds no module in a folder that is not on its path.")
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'db.sqlite3'}",
        "PYTHONSAFEPATH": safe_path,
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)  # that of these tests
    run = subprocess.run(
        [sys.executable, *called, "showmigrations", "payments"],
        cwd=ROOT / folder,
        env=environment,
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    assert "[ ] 0001_initial" in run.stdout


@pytest.mark.nightly
def test_the_server_starts_again_on_what_it_has_left(tmp_path: Path) -> None:
    """Migrating and seeding once more changes nothing: a retry after a restart is replayed."""
    order, database = Order(), f"sqlite:///{tmp_path / 'db.sqlite3'}"
    responses = []
    for _ in range(2):
        with (
            running(tmp_path / "log", DATABASE_URL=database, WORKERS="1") as url,
            closing(Api(url)) as api,
        ):
            assert api.get("/healthz").text == "ok\n"
            responses.append(api.send("/api/charges/", order))

    first, retry = responses
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.content == first.content


@pytest.mark.nightly
def test_faults_are_simulated_only_where_that_is_switched_on(tmp_path: Path) -> None:
    """Without SIMULATE=1, nobody can kill the server with a header."""
    database, order = f"sqlite:///{tmp_path / 'db.sqlite3'}", Order(fault="kill=before-effect")
    with (
        running(tmp_path / "log", DATABASE_URL=database, SIMULATE="", WORKERS="1") as url,
        closing(Api(url)) as api,
    ):
        assert api.send("/api/charges/", order).status_code == 201


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


def test_the_ledger_books_once_for_each_key(tmp_path: Path) -> None:
    """A key again, and the response is the first one; another key is another booking."""
    asked = {"reference": "R", "amount": 1, "currency": "EUR"}

    with (
        ledger.running(tmp_path / "log") as url,
        httpx.Client(base_url=url) as http,
        ThreadPoolExecutor(10) as pool,
    ):

        def book(key: str) -> bytes:
            response = http.post("/bookings", json=asked, headers={"Idempotency-Key": key})
            return response.raise_for_status().content

        def counted(**query: str) -> dict[str, int]:
            told: dict[str, int] = http.get("/calls", params=query).json()
            return told

        assert len(set(pool.map(book, ["one"] * 20))) == 1
        assert counted(key="one") == {"calls": 20, "effects": 1}
        book("other")
        assert counted(key="other") == {"calls": 1, "effects": 1}
        assert counted(reference="R") == {"calls": 21, "effects": 2}
        assert http.post("/bookings", json=asked).status_code == 400


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
