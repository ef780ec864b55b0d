"""``manage.py run_messaging``: relay, inbox and purge in one process, which ends in good order."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from idempotency_django.contrib.messaging import (
    Event,
    dead_letters,
    publish,
    run_messaging,
    running,
)
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.messaging.running import PartEnded
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import eventually
from tests.contrib.messaging.running.consumers import billing
from tests.contrib.messaging.running.topics import IDEMPOTENCY
from tests.models import Effect
from tests.support.outside import environment
from tests.support.outside import running as process

COMMAND = ("-m", "django", "run_messaging", "--poll", "0.1", "--purge-every", "0.2")


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
    pay("sent")
    event = Event(id="1", source="/shop", type="order.paid", data={"order": "retried"})
    dead_letters.keep(billing, event, ValueError("no"))
    InboxMessage.objects.update(state="pending", process_after=DatabaseNow())
    with process(*COMMAND, env=settings_of()) as messaging:
        eventually(lambda: has_effect("sent") and has_effect("retried"))
        eventually(lambda: not OutboxMessage.objects.exists())
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
    """If a part ends with an error, the process stops the others, and exits with 1 and its name."""
    (tmp_path / "broken_settings.py").write_text(
        "from tests.contrib.messaging.running.settings import *\n"
        'ROOT_URLCONF = "tests.contrib.messaging.running.nowhere"\n'
    )
    env = settings_of(PYTHONPATH=str(tmp_path)) | {"DJANGO_SETTINGS_MODULE": "broken_settings"}
    pipe = subprocess.PIPE
    with process(*COMMAND, "--skip-checks", env=env, stderr=pipe) as messaging:
        _, errors = messaging.communicate(timeout=60)
    assert messaging.returncode == 1
    assert "CommandError: The inbox ended with an error, so all parts were stopped" in errors
    assert "tests.contrib.messaging.running.nowhere" in errors


@pytest.mark.parametrize("name", ["relay", "inbox", "purge"])
def test_each_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part ends, the others are stopped, and the error says which it was."""
    stopped = []

    def works(stop: threading.Event, **_: Any) -> None:
        assert stop.wait(30)
        stopped.append(True)

    def dies(stop: threading.Event, **_: Any) -> None:
        raise SystemExit(3)

    for part in ("relay", "inbox", "purge"):
        monkeypatch.setattr(running, f"run_{part}", dies if part == name else works)
    with pytest.raises(PartEnded, match=f"The {name} ended with an error"):
        run_messaging(threading.Event())
    assert len(stopped) == 2


@pytest.mark.django_db(transaction=True)
def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command passes the options on, and ends with the text of what went wrong."""
    given = {}

    def run(stop: threading.Event, **options: Any) -> None:
        given.update(options)
        raise PartEnded("The relay has ended.")

    command = "idempotency_django.contrib.messaging.management.commands.run_messaging"
    monkeypatch.setattr(f"{command}.run_messaging", run)
    with pytest.raises(CommandError, match="The relay has ended"):
        call_command("run_messaging", "--poll", "2")
    assert given["poll"].total_seconds() == 2
    assert given["purge_every"].total_seconds() == 3600
