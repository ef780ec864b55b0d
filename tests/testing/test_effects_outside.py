"""The effect sanitizer: what no rollback undoes is noticed in a claim, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.cache import caches
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from idempotency_django import idempotent
from idempotency_django.testing import effects_outside
from tests.client.scripted import scripted
from tests.models import Effect as Row
from tests.support.shared import new_key

HERE = "tests/testing/test_effects_outside.py:"


@pytest.fixture
def server() -> Iterator[int]:
    """The port of an HTTP server that is no part of the project."""
    with scripted() as server:
        yield int(server.url.rpartition(":")[2])


def noticed(do: Callable[[], object], **policy: Any) -> list[str]:
    """The effects of a protected view that does this."""

    work = [do]  # a function in a variable would look like a view in a decorator

    @idempotent(**policy)
    def view(request: HttpRequest) -> HttpResponse:
        work[0]()
        return HttpResponse("done", "text/plain")

    with effects_outside() as effects:
        assert send(view).content == b"done"
    return effects


def send(view: Callable[..., Any]) -> HttpResponse:
    """The response of a view to a POST with a new key."""
    response: HttpResponse = view(
        RequestFactory().post("/charges/", headers={"Idempotency-Key": new_key()})
    )
    return response


@pytest.mark.django_db(transaction=True)
class TestNetwork:
    def test_http(self, server: int) -> None:
        """A call of another service within the transaction is noticed, by name, with its line."""
        [effect] = noticed(lambda: httpx.post(f"http://localhost:{server}/"))
        did = f"POST /charges/ talked to localhost:{server} within its transaction at {HERE}"
        assert effect.startswith(did)
        assert "after_commit()" in effect

    def test_async_view(self, server: int) -> None:
        """An async view is leased: outside of a step, a call is noticed, without its host name."""

        @idempotent
        async def view(request: HttpRequest) -> HttpResponse:
            async with httpx.AsyncClient() as client:
                await client.post(f"http://localhost:{server}/")
            return HttpResponse("done", "text/plain")

        async def both() -> list[str]:
            with effects_outside() as effects:
                request = RequestFactory().post("/charges/", headers={"Idempotency-Key": new_key()})
                await view(request)
            return effects

        [effect, *_] = asyncio.run(both())
        assert f":{server} outside of a step at {HERE}" in effect


@pytest.mark.django_db(transaction=True)
class TestProcessesAndFiles:
    @pytest.mark.parametrize(
        "run",
        [
            pytest.param(lambda: subprocess.run([sys.executable, "-V"], check=True), id="run"),
            pytest.param(lambda: os.system(f"{sys.executable} -V"), id="system"),
            pytest.param(
                lambda: os.waitpid(
                    os.posix_spawn(sys.executable, [sys.executable, "-V"], os.environ), 0
                ),
                id="spawn",
            ),
        ],
    )
    def test_process(self, run: Callable[[], object]) -> None:
        """A program that is started within the transaction is noticed."""
        [effect] = noticed(run)
        assert f"POST /charges/ started {sys.executable} within" in effect

    def test_written(self, tmp_path: Path) -> None:
        """A file that is opened for writing is noticed, and one for reading is not."""
        (tmp_path / "old").write_text("")

        def write() -> None:
            (tmp_path / "old").read_text()
            with (tmp_path / "new").open("a"):
                pass
            os.close(os.open(tmp_path / "low", os.O_WRONLY | os.O_CREAT))

        for effect, name in zip(noticed(write), ("new", "low"), strict=True):
            assert f"POST /charges/ wrote to {tmp_path / name} within" in effect


@pytest.mark.django_db(transaction=True)
class TestSteps:
    def test_step(self, server: int) -> None:
        """A leased view may do anything in a step; outside of one, a call is noticed."""

        @idempotent(mode="leased")
        def view(request: Any) -> HttpResponse:
            request.idempotency.step("charge", *work)
            httpx.post(f"http://localhost:{server}/second")
            return HttpResponse("done", "text/plain")

        def charge() -> str:
            Row.objects.create(reference="a")
            httpx.post(f"http://localhost:{server}/first")
            return "done"

        work = [charge]
        with effects_outside() as effects:
            send(view)
        [effect] = effects
        assert "outside of a step" in effect
        assert "request.idempotency.step()" in effect

    def test_commit_hook(self, server: int) -> None:
        """What a leased view leaves to a commit is noticed, even if only a library does it."""

        def later() -> None:
            with transaction.atomic():
                transaction.on_commit(partial(httpx.post, f"http://localhost:{server}/"))

        [effect] = noticed(later, mode="leased")
        assert f"talked to localhost:{server} outside of a step at {HERE}" in effect


@pytest.mark.django_db(transaction=True)
class TestNoFalseAlarm:
    def test_outside(self, server: int) -> None:
        """What is done outside of a handler is not noticed, nor is what follows the commit."""

        def later() -> None:
            transaction.on_commit(lambda: httpx.post(f"http://localhost:{server}/") and None)

        with effects_outside() as effects:
            httpx.post(f"http://localhost:{server}/")
        assert effects == []
        assert noticed(later) == []

    def test_caches_logs_and_temporary_files(
        self, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cache's and a log's files, temporary files, imports and devices are no effects."""
        settings.CACHES = {
            "default": {
                "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
                "LOCATION": str(tmp_path / "cache"),
            }
        }
        (tmp_path / "imported_by_a_view.py").write_text("VALUE = 1\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        handler = logging.FileHandler(tmp_path / "log", delay=True)
        logger = logging.getLogger("tests.effects")
        logger.addHandler(handler)

        def work() -> None:
            caches["default"].set("a", 1)
            logger.error("It is written to a file that is opened now.")
            with tempfile.NamedTemporaryFile() as file:
                file.write(b"a")
            __import__("imported_by_a_view")
            Path(os.devnull).write_text("a")

        try:
            assert noticed(work) == []
        finally:
            logger.removeHandler(handler)
            handler.close()

    def test_hook_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        """An error of the sanitizer is logged, and the view goes on."""

        def odd() -> None:
            sys.audit("open", object(), "w", 0)

        assert noticed(odd) == []
        assert "An effect (open) could not be noted." in caplog.text


def test_not_installed() -> None:
    """Whoever watches nothing pays nothing: there is no hook for audit events."""
    program = """
import sys
added = []
sys.addaudithook = added.append
import django
from django.conf import settings
settings.configure(
    SECRET_KEY="a",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "idempotency_django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from idempotency_django import idempotent_call
from idempotency_django.testing import effects_outside
idempotent_call(lambda execution: 1, key="a", scope="b")
without = len(added)
with effects_outside():
    with effects_outside():
        pass
print(without, len(added))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(f"[{done.stdout.strip().replace(' ', ',')}]") == [0, 1], done.stderr
