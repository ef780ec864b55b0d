"""The functions that PostgreSQL claims and completes by, and what happens without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.errors import StoreUnavailable
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.database.dialects import postgresql
from idempotency_django.stores.records import Claim, Record, Status
from idempotency_django.testing import ANSWER, an_operation, in_threads

pytestmark = [
    pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the functions are PostgreSQL's"),
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.driver,
]

USING = settings.ALIASES.get("postgres", "default")
NAMES = ("idempotency_acquire_2", "idempotency_complete_1")


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process that has not asked yet."""
    monkeypatch.setattr(postgresql, "_has_functions", {})


def execute(sql: str) -> Any:
    with connections[USING].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def restored() -> Iterator[None]:
    """A test drops functions, which are made again."""
    yield
    execute("SET search_path TO DEFAULT")
    call_command("migrate", "idempotency_django", "0005", database=USING, verbosity=0)
    call_command("migrate", "idempotency_django", database=USING, verbosity=0)


def drop() -> None:
    for name in NAMES:
        execute(f"DROP FUNCTION {name}")


@contextmanager
def statements() -> Iterator[list[str]]:
    """The statements in the block, but for those that only begin and end transactions."""
    found: list[str] = []
    with CaptureQueriesContext(connections[USING]) as queries:
        yield found
    found += [q["sql"] for q in queries if q["sql"] not in ("BEGIN", "COMMIT", "ROLLBACK")]


def run(store: DatabaseStore, operation: Any) -> Claim | Record:
    """One request: claimed and completed, or told what is there."""
    with store.transaction():
        acquired = store.acquire(operation)
        if isinstance(acquired, Claim):
            assert store.complete(acquired, ANSWER)
    return acquired


def assert_works(store: DatabaseStore, *, by_functions: bool) -> None:
    """A first request and its retry, by functions or by plain statements."""
    operation = an_operation(count_replays=True)
    with statements() as sent:
        assert isinstance(run(store, operation), Claim)
        again = run(store, operation)
    assert isinstance(again, Record)
    assert (again.status, again.payload) == (Status.COMPLETED, ANSWER)
    called = ["idempotency_" in sql.split("(")[0] for sql in sent if "has_function" not in sql]
    assert any("idempotency_acquire_2(" in sql for sql in sent) is by_functions, (called, sent)
    assert any("INSERT INTO" in sql for sql in sent) is not by_functions
    row = IdempotencyKey.objects.using(USING).get(key=operation.key)
    assert row.replay_count == 1


def test_by_functions() -> None:
    """A claim, an answer and a replay are one call of a function each; a process asks once."""
    store, operation = DatabaseStore("default", using=USING), an_operation(count_replays=True)
    with statements() as first:
        run(store, operation)
    with statements() as replay:
        run(store, operation)
    with statements() as another:
        run(DatabaseStore("other", using=USING), an_operation())
    assert len(first) == 3
    assert "has_function_privilege" in first[0]
    assert len(replay) == 1
    assert len(another) == 2


def test_switched_off() -> None:
    """With ``functions=False``, the server gets plain statements, and is not asked."""
    store = DatabaseStore("default", using=USING, functions=False)
    with statements() as sent:
        run(store, an_operation())
    assert not any("function" in sql for sql in sent)
    assert_works(store, by_functions=False)


@pytest.mark.usefixtures("restored")
def test_new_code_before_its_migration() -> None:
    """A deployment may start the new code before it migrates: until then statements are plain."""
    call_command("migrate", "idempotency_django", "0005", database=USING, verbosity=0)
    assert_works(DatabaseStore("default", using=USING), by_functions=False)


def test_old_code_after_the_migration() -> None:
    """What plain statements have stored, functions replay, and the other way round."""
    old = DatabaseStore("default", using=USING, functions=False)
    new = DatabaseStore("default", using=USING)
    for first, second in ((old, new), (new, old)):
        operation = an_operation(count_replays=True)
        assert isinstance(run(first, operation), Claim)
        replayed = run(second, operation)
        assert isinstance(replayed, Record)
        assert replayed.payload == ANSWER


def test_two_releases_at_once() -> None:
    """A duplicate by functions meets a claim by plain statements as in progress, and vice versa."""
    old = DatabaseStore("default", using=USING, functions=False)
    new = DatabaseStore("default", using=USING)
    for first, second in ((old, new), (new, old)):
        operation = an_operation()
        with first.transaction():
            assert isinstance(first.acquire(operation), Claim)
            [told] = in_threads([lambda second=second, op=operation: run(second, op)])
        assert isinstance(told, Record)
        assert told.status is Status.IN_PROGRESS


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("lease", [None, 60])
def test_functions_that_vanish(lease: int | None) -> None:
    """A process that knew the functions is told that they are gone; the retry does without."""
    store = DatabaseStore("default", using=USING)
    run(store, an_operation())
    drop()
    operation = an_operation(lease=None if lease is None else timedelta(seconds=lease))

    def acquire() -> Claim | Record:
        if lease is not None:
            return store.acquire(operation)
        with store.transaction():
            return store.acquire(operation)

    with pytest.raises(StoreUnavailable):
        acquire()
    assert isinstance(acquire(), Claim)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", NAMES)
def test_one_function_is_missing(name: str) -> None:
    """If one of the functions is missing, statements are plain, and the check says so."""
    execute(f"DROP FUNCTION {name}")
    assert_works(DatabaseStore("default", using=USING), by_functions=False)
    assert [m.id for m in run_checks(databases=[USING]) if "functions" in m.msg] == [
        "idempotency_django.W054"
    ]


@pytest.mark.usefixtures("restored")
def test_answer_whose_function_vanishes() -> None:
    """If only the one for the answer vanishes, nothing of the request is committed."""
    store, operation = DatabaseStore("default", using=USING), an_operation()
    run(store, an_operation())
    execute(f"DROP FUNCTION {NAMES[1]}")
    with pytest.raises(StoreUnavailable):
        run(store, operation)
    assert not IdempotencyKey.objects.using(USING).filter(key=operation.key).exists()
    assert isinstance(run(store, operation), Claim)


@pytest.fixture
def poor_user() -> Iterator[None]:
    """A role that may use the tables."""
    execute("CREATE ROLE poor_user")
    try:
        tables = [m._meta.db_table for m in (IdempotencyKey, IdempotencyStep)]
        execute(f"GRANT ALL ON {', '.join(tables)} TO poor_user")
        execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO poor_user")
        yield
    finally:
        execute("RESET ROLE")
        execute(f"GRANT EXECUTE ON FUNCTION {', '.join(NAMES)} TO PUBLIC")
        execute("DROP OWNED BY poor_user")
        execute("DROP ROLE poor_user")


@pytest.mark.usefixtures("poor_user")
@pytest.mark.parametrize("name", NAMES)
def test_no_right_to_execute(name: str) -> None:
    """Where a function may not be executed, statements are plain."""
    execute(f"REVOKE EXECUTE ON FUNCTION {name} FROM PUBLIC")
    execute("SET ROLE poor_user")
    assert_works(DatabaseStore("default", using=USING), by_functions=False)


@pytest.mark.usefixtures("poor_user")
@pytest.mark.parametrize("name", NAMES)
def test_right_that_is_withdrawn(name: str) -> None:
    """A process that may no longer call them is told so once, and goes on without."""
    store = DatabaseStore("default", using=USING)
    execute("SET ROLE poor_user")
    run(store, an_operation())
    execute("RESET ROLE")
    execute(f"REVOKE EXECUTE ON FUNCTION {name} FROM PUBLIC")
    execute("SET ROLE poor_user")
    with pytest.raises(StoreUnavailable):
        run(store, an_operation())
    assert_works(store, by_functions=False)


@pytest.fixture
def tenants() -> Iterator[tuple[str, str]]:
    """Two schemas with tables and functions of their own, as django-tenants makes them."""
    names = ("tenant_one", "tenant_two")
    try:
        for name in names:
            execute(f"CREATE SCHEMA {name}")
            execute(f"SET search_path TO {name}")
            call_command("migrate", "idempotency_django", database=USING, verbosity=0)
        yield names
    finally:
        execute("SET search_path TO DEFAULT")
        for name in names:
            execute(f"DROP SCHEMA {name} CASCADE")


def keys_of(schema: str) -> set[str]:
    table = IdempotencyKey._meta.db_table
    return {row[0] for row in execute(f"SELECT key FROM {schema}.{table}")}


def test_tenants(tenants: tuple[str, str]) -> None:
    """Each schema has functions of its own, also when a live connection changes its search path."""
    store, operation = DatabaseStore("default", using=USING), an_operation()
    for _ in range(8):  # often enough for the server to keep a plan
        for name in tenants:
            execute(f"SET search_path TO {name}")
            run(store, an_operation())
    for name in tenants:
        execute(f"SET search_path TO {name}")
        assert isinstance(run(store, operation), Claim)
    assert keys_of(tenants[0]) & keys_of(tenants[1]) == {operation.key}
    assert not keys_of("public")


def test_functions_of_the_shared_schema(tenants: tuple[str, str]) -> None:
    """Where only the shared schema has functions, they use the tables of the search path."""
    store, operation = DatabaseStore("default", using=USING), an_operation()
    for name in tenants:
        for function in NAMES:
            execute(f"DROP FUNCTION {name}.{function}")
    for _ in range(8):
        for name in tenants:
            execute(f"SET search_path TO {name}, public")
            run(store, an_operation())
    for name in tenants:
        execute(f"SET search_path TO {name}, public")
        assert isinstance(run(store, operation), Claim)
    assert keys_of(tenants[0]) & keys_of(tenants[1]) == {operation.key}
    assert not keys_of("public")


@pytest.mark.usefixtures("restored")
def test_check() -> None:
    """``manage.py check --database`` says that the functions are missing, and only then."""

    def told() -> list[str]:
        found = run_checks(databases=[USING])
        return [str(message.msg) for message in found if "functions" in message.msg]

    assert told() == []
    drop()
    [message] = told()
    assert "plain statements" in message


def test_claims_in_somebody_elses_transaction() -> None:
    """The durability of a transaction that holds something else is left as it is."""
    store, operation = DatabaseStore("default", using=USING), an_operation(count_replays=True)
    run(store, operation)
    with transaction.atomic(using=USING):
        before = execute("SHOW synchronous_commit")
        with store.transaction():
            assert isinstance(store.acquire(operation), Record)
        assert execute("SHOW synchronous_commit") == before


@pytest.mark.usefixtures("restored")
def test_release_before_time_left() -> None:
    """The function of the release before stays, so that its processes keep calling it."""
    store = DatabaseStore("default", using=USING)
    operation = an_operation()
    run(store, operation)
    row = (
        "'k', 's', 'o', 'f', 't', 'p', 'm', 'p', 'c', false, null, null, null, 1, true, true, '1s'"
    )
    before = f"SELECT idempotency_acquire_1({row})"
    assert len(execute(before)[0][0]) == 1
    call_command("migrate", "idempotency_django", "0006", database=USING, verbosity=0)
    assert len(execute(before)[0][0]) == 12
    postgresql._has_functions.clear()
    assert_works(store, by_functions=False)
