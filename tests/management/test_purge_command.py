"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

import signal
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import purging
from tests.support.factories import records

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

DATABASE = "idempotency_django.stores.database.DatabaseStore"


def purge(*arguments: str) -> str:
    to = StringIO()
    call_command("purge_idempotency_keys", *arguments, stdout=to)
    return to.getvalue()


def count(alias: str = "default") -> int:
    return IdempotencyKey.objects.using(alias).count()


class TestSummary:
    """What the command says of what it did."""

    def test_plain(self) -> None:
        """The summary is one line; with --verbosity 0 nothing is said."""
        records(1)
        for arguments, said in ((), "Purged 3 keys and messages.\n"), (("--verbosity", "0"), ""):
            records(3, purgeable=True)
            assert purge("--batch-size", "2", *arguments) == said
            assert count() == 1

    def test_messages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Messages are purged, too."""
        batches = iter([1, 0])
        monkeypatch.setattr(purging, "_registered", [lambda *_: next(batches)])
        records(1, purgeable=True)
        assert purge() == "Purged 2 keys and messages.\n"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_stopped(self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
        """It ends after the batch in hand, and says what is done."""

        def delete(*_: Any) -> int:
            batches.append(3)
            signal.raise_signal(number)
            return 3

        batches: list[int] = []
        monkeypatch.setattr(purging, "_registered", [delete])
        stopped = "It was stopped: the next purge deletes the rest."
        assert purge() == f"Purged 3 keys and messages. {stopped}\n"
        assert batches == [3]

    def test_forgotten_migrate(self) -> None:
        """Without the tables, one sentence says what to do."""
        table = IdempotencyKey._meta.db_table
        for alias in settings.ALIASES.values():
            store = {"BACKEND": DATABASE, "OPTIONS": {"using": alias}}
            with connections[alias].cursor() as cursor:
                cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
            try:
                with (
                    override_settings(IDEMPOTENCY={"STORES": {"default": store}}),
                    pytest.raises(CommandError, match=r"manage\.py migrate") as refused,
                ):
                    purge()
            finally:
                with connections[alias].cursor() as cursor:
                    cursor.execute(f"ALTER TABLE {table}_away RENAME TO {table}")
            assert table in str(refused.value)


def test_refusals() -> None:
    """A size that makes no sense is refused with what to write instead."""
    records(1, purgeable=True)
    with pytest.raises(CommandError, match="invalid int value: 'many'"):
        purge("--batch-size", "many")
    with pytest.raises(CommandError, match=r"--batch-size is 0\. Pass 1 or more"):
        purge("--batch-size", "0")
    assert count() == 1
