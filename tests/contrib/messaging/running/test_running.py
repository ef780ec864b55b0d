"""``manage.py run_messaging``: relay, inbox and purge in one process, which ends in good order."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, transaction

from idempotency_django.contrib.messaging import Event, dead_letters, loops, publish
from idempotency_django.contrib.messaging.loops import Part, handling, run
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import eventually, in_threads
from tests.contrib.messaging.running.consumers import billing
from tests.contrib.messaging.running.topics import IDEMPOTENCY
from tests.models import Effect
from tests.support.outside import environment
from tests.support.outside import running as process
from tests.support.shared import LONG_AGO

COMMAND = ("-m", "django", "run_messaging")


def settings_of(**more: str) -> dict[str, str]:
    """The environment of a process that runs messaging."""
    return environment(DJANGO_SETTINGS_MODULE="tests.contrib.messaging.running.settings", **more)


def has_effect(order: str) -> bool:
    return Effect.objects.filter(reference=order).exists()


@pytest.fixture(autouse=True)
def topics(settings: Any) -> None:
    settings.IDEMPOTENCY = IDEMPOTENCY


def pay(order: str, **more: str) -> None:
    with transaction.atomic():
        publish("orders", {"order": order, **more}, type="order.paid")


@pytest.mark.e2e
@pytest.mark.django_db(transaction=True)
def test_all_parts_and_sigterm(tmp_path: Path) -> None:
    """One process sends, handles and purges. On SIGTERM it finishes what it has in hand, and exits
    with 0.
    """
    pay("old")
    OutboxMessage.objects.update(state="done", process_after=None, purge_at=LONG_AGO)
    pay("sent")
    event = Event(id="1", source="/shop", type="order.paid", data={"order": "retried"})
    dead_letters.keep(billing, event.to_json().encode(), ValueError("no"))
    InboxMessage.objects.update(state="pending", process_after=DatabaseNow())
    with process(*COMMAND, env=settings_of()) as messaging:
        eventually(lambda: has_effect("sent") and has_effect("retried"))
        eventually(lambda: not OutboxMessage.objects.filter(purge_at__lte=LONG_AGO).exists())
        pay("slow", folder=str(tmp_path))
        eventually((tmp_path / "begun").exists)
        messaging.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            messaging.wait(0.5)
        (tmp_path / "go").touch()
        assert messaging.wait(60) == 0
    assert has_effect("slow")
    assert set(OutboxMessage.objects.values_list("state", flat=True)) <= {"done"}


@pytest.mark.e2e
@pytest.mark.django_db(transaction=True)
def test_part_that_dies(tmp_path: Path) -> None:
    """If a part ends with an error, the process stops the others, and exits with 1."""
    (tmp_path / "broken_settings.py").write_text(
        "from tests.contrib.messaging.running.settings import *\n"
        'ROOT_URLCONF = "tests.contrib.messaging.running.nowhere"\n'
    )
    env = settings_of(PYTHONPATH=str(tmp_path)) | {"DJANGO_SETTINGS_MODULE": "broken_settings"}
    pipe = subprocess.PIPE
    with process(*COMMAND, "--skip-checks", env=env, stderr=pipe) as messaging:
        _, errors = messaging.communicate(timeout=60)
    assert messaging.returncode == 1
    assert "tests.contrib.messaging.running.nowhere" in errors


@pytest.mark.django_db(transaction=True)
def test_each_part() -> None:
    """Whichever part ends, the others finish what they have in hand, and its error is raised."""
    begun, finished = threading.Event(), list[bool]()

    def works() -> None:
        begun.set()
        assert stop.wait(30)
        finished.append(True)

    def dies() -> None:
        assert begun.wait(30)
        raise RuntimeError("purge")

    stop = threading.Event()
    with pytest.raises(RuntimeError, match="purge"):
        run(
            [Part("relay", works), Part("purge", dies), Part("idle", bool, timedelta(hours=1))],
            stop,
        )
    assert finished == [True]


@pytest.mark.django_db(transaction=True)
def test_command(tmp_path: Path, settings: Any) -> None:
    """The command takes a file for its health, and ends with the text of what is misconfigured."""
    with pytest.raises(OSError, match="nowhere"):
        call_command("run_messaging", "--health", f"{tmp_path}/nowhere/health")
    settings.IDEMPOTENCY = {"OUTBOX": 1}
    with pytest.raises(CommandError, match="OUTBOX"):
        call_command("run_messaging")


@pytest.mark.django_db(transaction=True)
def test_once_sends_what_its_handlers_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when nothing is due."""

    def publishes(event: Event, _: Any) -> Any:
        return event.data or pay("published")

    monkeypatch.setitem(billing._handlers, "order.paid", publishes)
    event = Event(id="2", source="/shop", type="order.paid", data={})
    dead_letters.keep(billing, event.to_json().encode(), ValueError("no"))
    InboxMessage.objects.update(state="pending", process_after=DatabaseNow())
    call_command("run_messaging", "--once", verbosity=0)
    assert [*OutboxMessage.objects.values_list("state", flat=True)] == ["done"]


@pytest.mark.django_db(transaction=True)
def test_error_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that meets one tries again soon, however long it waits when nothing is due."""
    monkeypatch.setattr(loops, "POLL", timedelta(seconds=0.01))
    stop, tries = threading.Event(), list[bool]()

    def purge() -> None:
        tries.append(True)
        if len(tries) == 1:
            raise OperationalError("away")
        stop.set()

    gives_up = threading.Timer(20, stop.set)
    gives_up.start()
    run([Part("purge", purge, timedelta(hours=1))], stop)
    gives_up.cancel()
    assert len(tries) == 2


@pytest.mark.django_db(transaction=True)
def test_exit_of_a_part() -> None:
    """A thread that exits ends the process with an error, for its supervisor to see."""
    with pytest.raises(RuntimeError, match="SystemExit"):
        run([Part("relay", sys.exit)], threading.Event())


@pytest.mark.django_db(transaction=True)
def test_health_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They share the signs of life: there are none while one of them hangs."""
    monkeypatch.setattr(loops, "HANDLER_TIMEOUT", timedelta(seconds=0.05))
    monkeypatch.setattr(loops, "BEAT", 0.01)
    stop, released = threading.Event(), threading.Event()
    health, beats, looks = tmp_path / "health", list[None](), threading.Semaphore(0)
    poll = timedelta(seconds=0.01)
    monkeypatch.setattr(loops.Beat, "beat", lambda self: beats.append(None))
    monkeypatch.setattr(loops.Part, "go_on", lambda *_: looks.release())

    def hang() -> None:
        if not released.is_set():
            with handling("inbox", "shop", "a message"):
                assert released.wait(30)

    def operator() -> None:
        try:
            eventually(lambda: "Messaging has handled a message" in caplog.text)
            health.unlink()
            seen = len(beats)
            while looks.acquire(blocking=False):  # those before it
                pass
            for _ in range(2 * len(parts)):
                assert looks.acquire(timeout=30)
            assert (len(beats), health.exists()) == (seen, False)
            released.set()
            eventually(health.exists)
        finally:
            released.set()
            stop.set()

    parts = [Part("relay", bool, poll), Part("inbox", hang, poll)]
    in_threads([lambda: run(parts, stop, health=str(health)), operator])
    assert caplog.text.count("Messaging has handled") == 1
