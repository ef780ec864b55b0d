"""MariaDB and MySQL: a claim that cannot have the next number of its table meets contention."""

from __future__ import annotations

import threading
from contextlib import closing, suppress

import pytest
from django.conf import settings
from django.contrib.contenttypes.models import ContentType
from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Record, Status
from idempotency_django.testing import an_operation, eventually

ALIAS = settings.ALIASES.get("mariadb")

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.skipif(ALIAS is None, reason="NO mariadb HERE"),
]


def copy_slowly(connection: BaseDatabaseWrapper) -> None:
    """Insert two rows in one statement, of which the second is long in coming.

    The lock on the table's numbers is the statement's until it ends, as it is that of each claim.
    """
    values = {str(field.column): "''" for field in IdempotencyKey._meta.concrete_fields}
    del values["id"]
    values |= dict.fromkeys(["attempt", "hold", "pinned", "replay_count"], "1")
    values |= {name: "NULL" for name in values if name.endswith("_at")}
    values |= {"response_status": "NULL", "attempts": "NULL", "created_at": "UTC_TIMESTAMP()"}
    values["key"] = "CONCAT(id, IF(id > (SELECT MIN(id) FROM django_content_type), SLEEP(30), ''))"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {IdempotencyKey._meta.db_table} "
            f"({', '.join(map('`{}`'.format, values))}) "
            f"SELECT {', '.join(values.values())} FROM django_content_type"
        )


def test_numbers_that_are_locked() -> None:
    """Error 1467 says that others were faster: 409, and not that the store cannot be reached."""
    store = DatabaseStore("default", using=str(ALIAS))
    for name in ("first", "second"):
        ContentType.objects.using(ALIAS).create(app_label="tests", model=name)
    slow = connections.create_connection(str(ALIAS))
    slow.ensure_connection()
    slow_id = slow.connection.thread_id()

    def copy() -> None:
        with closing(slow):
            slow.inc_thread_sharing()
            with suppress(OperationalError):  # it is ended, below
                copy_slowly(slow)

    def is_asleep() -> bool:
        with connections[str(ALIAS)].cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM information_schema.processlist "
                "WHERE id = %s AND state = 'User sleep'",
                [slow_id],
            )
            return cursor.fetchone() is not None

    thread = threading.Thread(target=copy)
    slow.inc_thread_sharing()
    thread.start()
    try:
        eventually(is_asleep)
        with connections[str(ALIAS)].cursor() as cursor:
            cursor.execute("SET innodb_lock_wait_timeout = 1")
        with store.transaction():
            found = store.acquire(an_operation())
        assert isinstance(found, Record)
        assert found.status is Status.IN_PROGRESS
    finally:
        with connections[str(ALIAS)].cursor() as cursor:
            cursor.execute(f"KILL QUERY {slow_id}")
        thread.join()
        connections[str(ALIAS)].close()
