"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import purging, stores
from idempotency_django.testing import eventually, in_threads
from testproject.ledger import STOP_TIMEOUT
from tests.support.factories import copies, record, records
from tests.support.outside import environment, running

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

DATABASE = "idempotency_django.stores.database.DatabaseStore"


def purge(*arguments: str) -> str:
    """What the command says."""
    to = StringIO()
    call_command("purge_idempotency_keys", *arguments, stdout=to)
    return to.getvalue()


def count(alias: str = "default") -> int:
    """How many records there are."""
    return IdempotencyKey.objects.using(alias).count()


class TestSummary:
    """What the command says of what it did."""

    def test_plain(self) -> None:
        """The summary is one line."""
        records(3, purgeable=True)
        records(1)
        said = purge("--batch-size", "2")
        assert re.fullmatch(r"Purged 3 idempotency keys in \d+\.\d seconds\.\n", said)
        assert count() == 1

    def test_quiet(self) -> None:
        """With --verbosity 0 nothing is said, and all is done."""
        records(2, purgeable=True)
        assert purge("--verbosity", "0") == ""
        assert count() == 0

    @pytest.mark.parametrize(("found", "said"), [(0, "0 idem"), (1, "1 idempotency key in")])
    def test_numbers(self, found: int, said: str) -> None:
        """One key is one key."""
        records(found, purgeable=True)
        assert purge().startswith(f"Purged {said}")

    def test_messages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One message is one message."""
        batches = iter([1, 0])
        messages = purging.Purgeable("outbox messages", lambda *_: next(batches))
        monkeypatch.setattr(purging, "_registered", {"outbox messages": messages})
        assert purge().startswith("Purged 0 idempotency keys, 1 outbox message in ")

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


class TestOptions:
    """What the command can be told."""

    @pytest.mark.parametrize(
        ("option", "value", "advice"),
        [
            ("--batch-size", "0", "'0' must be a number above 0"),
            ("--batch-size", "many", "'many' must be a number above 0"),
            ("--batch-size", "²", "must be a number above 0"),
        ],
    )
    def test_refusals(self, option: str, value: str, advice: str) -> None:
        """An argument that makes no sense is refused with what to write instead."""
        records(1, purgeable=True)
        with pytest.raises(CommandError, match=re.escape(advice)):
            purge(option, value)
        assert count() == 1

    @pytest.mark.skipif(len(settings.DATABASES) < 2, reason="two stores take two databases")
    def test_store(self) -> None:
        """All stores are purged."""
        aliases = list(settings.DATABASES)[:2]
        backend = "idempotency_django.stores.database.DatabaseStore"
        made: dict[str, Any] = {
            name: {"BACKEND": backend, "OPTIONS": {"using": alias}}
            for name, alias in zip(("default", "other"), aliases, strict=True)
        }
        with override_settings(IDEMPOTENCY={"STORES": made}):
            for alias in aliases:
                records(2, alias, purgeable=True)
            assert "Purged 4 " in purge()
            assert [count(alias) for alias in aliases] == [0, 0]


class TestInterrupt:
    """Ctrl-C, pressed while a batch is being deleted."""

    @pytest.fixture(autouse=True)
    def handler(self) -> Iterator[None]:
        """Ctrl-C works as in a terminal, and again after the test."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.fixture
    def pressed(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How often Ctrl-C is pressed within each batch; the store is endless."""
        presses = [0, 1]

        def batch(older_than: timedelta, limit: int) -> int:
            for _ in range(presses.pop(0)):
                signal.raise_signal(signal.SIGINT)
            return limit

        monkeypatch.setattr(stores["default"], "purge", batch)
        return presses

    def test_batch_is_finished(self, pressed: list[int]) -> None:
        """The batch is finished, counted, and the last one."""
        with pytest.raises(CommandError, match=r"^Interrupted\. Purged 10,000 ") as caught:
            purge()
        assert caught.value.returncode == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_pressed_twice(self, pressed: list[int]) -> None:
        """Who cannot wait for that presses it again."""
        pressed[:] = [2]
        with pytest.raises(KeyboardInterrupt):
            purge()

    def test_in_the_background(self, pressed: list[int]) -> None:
        """Where Ctrl-C is ignored, it stays so."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(IndexError):  # the presses are used up
            purge()

    def test_in_a_thread(self) -> None:
        """The command can be called from a thread, which no Ctrl-C ever reaches."""
        records(2, purgeable=True)
        assert in_threads([purge])[0].startswith("Purged 2 ")


# Somebody may run the tests in the background, where Ctrl-C is ignored.
RUN = (
    "import signal, sys\n"
    "from django.core.management import execute_from_command_line\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "execute_from_command_line(sys.argv)\n"
)


@pytest.mark.e2e
@pytest.mark.parametrize("alias", settings.ALIASES.values(), ids=list(settings.ALIASES))
def test_interrupted(alias: str) -> None:
    """Ctrl-C ends the purge between two batches, and the command says how much is gone."""
    total, batch = 4000, 2
    copies(total - 1, record(alias, purgeable=True))
    command = ("-c", RUN, "purge_idempotency_keys", "--batch-size", str(batch))
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(*command, env=environment(alias), **pipes) as process:
        eventually(lambda: count(alias) < total)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=STOP_TIMEOUT)
    assert process.returncode == 130, error
    assert out == ""
    said = re.search(r"Interrupted\. Purged ([\d,]+) idempotency keys before that\.", error)
    assert said, error
    gone = total - count(alias)
    assert 0 < gone < total
    assert gone % batch == 0
    assert gone == int(said[1].replace(",", ""))
