"""Processes that have died are not silent: ``idempotency_status`` names them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.test import Client

from idempotency_django.contrib.messaging.heartbeats import Beat
from idempotency_django.contrib.messaging.models import RunningProcess
from idempotency_django.models import DatabaseNow
from tests.support.reports import status
from tests.support.shared import cut_connection

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def rows(using: str) -> Any:
    return RunningProcess.objects.using(using).order_by("pk")


def silence(using: str, **chosen: Any) -> None:
    """Let these processes have died a while ago."""
    rows(using).filter(**chosen).update(beat_at=DatabaseNow() - timedelta(minutes=2))


def beats(name: str) -> Beat:
    beat = Beat(name)
    beat.beat()
    return beat


def test_process_that_dies_is_named(using: str) -> None:
    """Until it is started again; one that ended in good order is not."""
    beats("relay"), beats("inbox").end()
    assert re.search(r"  processes silent +relay +0", status())
    silence(using)
    said = status()
    assert "! processes silent" in said
    assert (
        f"{rows(using).get().process}: it hangs, was killed, or cannot reach the database" in said
    )
    beats("inbox")
    assert "! processes silent" in status()
    again = beats("relay")
    assert "! processes silent" not in status()
    again.end()
    assert [row.name for row in rows(using)] == ["inbox"]


def test_process_replaces_those_that_died_before_it_began_only(using: str) -> None:
    """A second process that works does not hide that the first one has died since."""
    first, second = beats("relay"), beats("relay")
    rows(using).filter(pk=first._pk).update(beat_at=DatabaseNow() - timedelta(minutes=2))
    rows(using).filter(pk=second._pk).update(started_at=DatabaseNow() - timedelta(hours=1))
    second._due = 0.0
    second._since = rows(using).get(pk=second._pk).started_at
    second.beat()
    assert "! processes silent" in status()


def test_beats_are_few(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is written in ten seconds, however often it is asked for."""
    beat = beats("relay")
    silence(using)
    for _ in range(3):
        beat.beat()
    assert "! processes silent" in status()
    monkeypatch.setattr(beat, "_due", 0.0)
    beat.beat()
    assert "! processes silent" not in status()


def test_row_that_was_deleted_comes_again(using: str) -> None:
    """An operator has deleted the row of a process that only seemed to be dead."""
    beat = beats("relay")
    rows(using).delete()
    beat._due = 0.0
    beat.beat()
    assert [row.name for row in rows(using)] == ["relay"]


def test_connection_is_lost_within_a_beat(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its row was written, and before it was read: the next beat writes another one, which
    replaces the first.
    """
    beat, lost = Beat("relay"), list[str]()

    def cut(run: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("SELECT") and not lost:
            lost.append(sql)
            raise OperationalError("the server has gone away")
        return run(sql, *rest)

    with connections[using].execute_wrapper(cut):
        beat.beat()
    [half] = rows(using)
    silence(using)
    monkeypatch.setattr(beat, "_due", 0.0)
    beat.beat()
    assert [row.name for row in rows(using)] == ["relay"]
    assert rows(using).get().pk != half.pk
    assert "! processes silent" not in status()
    beat.end()
    assert not rows(using)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")
def test_end_after_a_lost_connection() -> None:
    """A process that ends in good order leaves no row, though its connection was cut."""
    beat = beats("relay")
    connection.close_at = None  # it is kept, as by CONN_MAX_AGE
    cut_connection()
    beat.end()
    assert not RunningProcess.objects.exists()


def test_operator_deletes_a_process_that_is_not_needed(admin_client: Client) -> None:
    """In the admin, which changes nothing else of it."""
    beats("relay")
    page = "/admin/idempotency_messaging/runningprocess/"
    assert b"relay" in admin_client.get(page).content
    row = RunningProcess.objects.get()
    assert admin_client.get(f"{page}{row.pk}/change/").status_code == 200
    assert admin_client.get(f"{page}add/").status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
    assert admin_client.post(page, chosen).status_code == 302
    assert not RunningProcess.objects.exists()
