"""How many messages a request sends to PostgreSQL, counted from libpq's trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.errors import ClaimLost, OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.stores.records import Claim
from idempotency_django.testing import an_operation, eventually, in_threads
from idempotency_django.testing.contract import as_claim
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, new_key, post, record

pytestmark = [
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL"),
    pytest.mark.skipif(
        "not hasattr(connection.Database, 'ClientCursor')", reason="needs psycopg 3"
    ),
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]


def bare(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return JsonResponse({}, status=201)


def with_atomic(request: HttpRequest) -> HttpResponse:
    """Has its effect in a transaction that a late owner cannot commit."""
    with request.idempotency.atomic():  # type: ignore[attr-defined]
        return bare(request)


def with_steps(request: HttpRequest) -> HttpResponse:
    """Takes two steps elsewhere, and one that has its effect here."""
    step = request.idempotency.step  # type: ignore[attr-defined]
    first = step("elsewhere", dict, number=1)
    step("here", lambda: Effect.objects.create(reference="a").pk)
    step("elsewhere again", dict, number=2)
    return JsonResponse(first, status=201)


hooked: list[str] = []
"""The status of the record, as others saw it, when a hook of the view ran."""


def dangle() -> None:
    LogEntry.objects.create(user_id=10**6, action_flag=ADDITION)


def conflict(code: str) -> Callable[[], None]:
    """Something that the database refuses at COMMIT with the code."""

    def refuse() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$"
            )
            cursor.execute(
                f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON {Effect._meta.db_table} "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()"
            )
        Effect.objects.create(reference="b")

    return refuse


def refuse_response(code: str) -> Callable[[], None]:
    """Has the server refuse the response, before any COMMIT."""

    def refuse() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION pg_temp.refuse_response() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$"
            )
            cursor.execute(
                f"CREATE TRIGGER refuse_response BEFORE INSERT ON {IdempotencyKey._meta.db_table} "
                "FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse_response()"
            )

    return refuse


def lock_rows() -> None:
    """Reads rows through a cursor of the server's, which locks them."""
    rows = Effect.objects.select_for_update().iterator(chunk_size=1)
    assert [row.reference for row in rows] == ["a"]


def hook() -> None:
    """Asks, after the commit, what others see."""

    def look() -> None:
        hooked.extend(in_threads([lambda: IdempotencyKey.objects.get().status]))

    transaction.on_commit(look)


def end() -> None:
    """Ends the transaction, by the driver's own means."""
    with connection.connection.cursor() as cursor:
        cursor.execute("COMMIT")


def fail() -> None:
    raise LookupError("boom")


wrapped: list[str] = []
"""What a wrapper that the handler has added has seen."""


def note(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
    wrapped.append(sql)
    return execute(sql, *arguments)


ACTS: dict[str, Callable[[], object]] = {
    "close": connection.close,
    "dangle": dangle,
    "deadlock": conflict("40P01"),
    "end": end,
    "fail": fail,
    "hook": hook,
    "lock": lock_rows,
    "lost": conflict("08006"),
    "mark": lambda: transaction.set_rollback(True),
    "read-only": refuse_response("25006"),
    "serialize": conflict("40001"),
    "serialize the response": refuse_response("40001"),
    "timeout": refuse_response("57014"),
    "wrap": lambda: connection.execute_wrappers.append(note),
}


def acts(request: HttpRequest) -> HttpResponse:
    """Has an effect, and does what it is asked for."""
    Effect.objects.create(reference="a")
    ACTS[json.loads(request.body)["reference"]]()
    return JsonResponse({}, status=201)


urlpatterns = [
    path("acts/", idempotent(acts)),
    path("bare/", bare),
    path("transaction/", transaction.atomic(bare)),
    path("first/", idempotent(bare)),
    path("leased/", idempotent(mode="leased")(bare)),
    path("atomic/", idempotent(mode="leased")(with_atomic)),
    path("steps/", idempotent(mode="leased")(with_steps)),
]


@contextmanager
def messages() -> Iterator[list[str]]:
    """What kinds of messages are sent to the server within the block."""
    sent: list[str] = []
    connection.ensure_connection()
    driver = connection.connection
    with tempfile.NamedTemporaryFile("r") as trace:
        driver.pgconn.trace(trace.fileno())
        try:
            yield sent
        finally:
            driver.pgconn.untrace()
        trace.seek(0)  # libpq writes through the same descriptor
        for line in trace.read().splitlines():
            _, sender, *what = [*line.split("\t"), ""]  # some are a statement's further lines
            if sender == "F":
                sent.append(what[1])


def sent_by(client: Client, url: str, key: str | None) -> list[str]:
    """The messages of a request that succeeds."""
    with messages() as sent:
        assert post(client, url, key).status_code == 201
    return sent


class TestBudget:
    """The messages of a whole request, where a bare one in ``atomic()`` sends three."""

    def test_first_request(self, client: Client) -> None:
        """A first request sends as many as a bare one in a transaction."""
        post(client, "/first/", new_key())
        assert len(sent_by(client, "/transaction/", None)) == 3
        assert len(sent_by(client, "/first/", new_key())) == 3
        assert effects() == 3

    def test_replay(self, client: Client) -> None:
        """A replay sends two, its count included."""
        key = new_key()
        post(client, "/first/", key)
        assert len(sent_by(client, "/first/", key)) == 2
        assert record(key).replay_count == 1

    def test_leased(self, client: Client) -> None:
        """A leased request sends two more than its handler."""
        post(client, "/leased/", new_key())
        assert len(sent_by(client, "/bare/", None)) == 1
        assert len(sent_by(client, "/leased/", new_key())) == 3

    def test_atomic(self, client: Client) -> None:
        """With ``atomic()`` a leased request sends four more than its handler: its last look at
        the claim goes with the COMMIT.
        """
        post(client, "/atomic/", new_key())
        assert len(sent_by(client, "/atomic/", new_key())) == 5
        assert effects() == 2

    def test_steps(self, client: Client) -> None:
        """A step sends one message, and two more if it has statements of its own."""
        post(client, "/steps/", new_key())
        key = new_key()
        assert len(sent_by(client, "/steps/", key)) == 2 + 1 + 3 + 1
        assert effects() == 2
        names = [step.name for step in record(key).steps.all()]
        assert names == ["elsewhere", "here", "elsewhere again"]


@pytest.fixture
def one_by_one(settings: Any) -> None:
    """Each statement is sent in a message of its own."""
    store = "idempotency_django.stores.database.DatabaseStore"
    options = {"BACKEND": store, "OPTIONS": {"combine_statements": False}}
    settings.IDEMPOTENCY = {"STORES": {"default": options}}


@pytest.fixture
def reconnected() -> Iterator[None]:
    """A test changes how the connection is made."""
    connection.close()
    yield
    connection.close()


class TestPlainWay:
    """Where something speaks against it, each statement is sent by itself, as ever."""

    def assert_one_by_one(self, client: Client, *, first: int = 6, replay: int = 5) -> None:
        key = new_key()
        post(client, "/first/", new_key())
        assert len(sent_by(client, "/first/", key)) == first
        assert len(sent_by(client, "/first/", key)) == replay

    def test_switched_off(self, client: Client, one_by_one: None) -> None:
        """The store's option says so."""
        self.assert_one_by_one(client)

    @pytest.mark.parametrize("option", ["server_side_binding", "isolation_level"])
    def test_options(
        self, client: Client, reconnected: None, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        """The driver binds at the server, or BEGIN has more to say."""
        value: Any = True
        if option == "isolation_level":
            value = connection.Database.IsolationLevel.REPEATABLE_READ
        options = connection.settings_dict["OPTIONS"]
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, option: value})
        key = new_key()
        post(client, "/first/", new_key())
        with messages() as sent:
            post(client, "/first/", key)
        assert len([kind for kind in sent if kind in ("Query", "Sync")]) == 6

    def test_within_a_transaction(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """The transaction is the request's, and what else is in it is not ours to commit: an
        operation in it is a savepoint. The lock and the look at the key need not be sent alone.
        """
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        self.assert_one_by_one(client, first=7, replay=6)

    def test_wrapped_cursors(self, client: Client) -> None:
        """Who wraps Django's cursors may send, or add to ours, what is not ours to commit."""
        with connection.execute_wrapper(lambda execute, *arguments: execute(*arguments)):
            self.assert_one_by_one(client)

    def test_wrapped_by_the_handler(self, client: Client) -> None:
        """A wrapper that is there since the claim gets the response alone, without COMMIT."""
        wrapped.clear()
        try:
            assert post(client, "/acts/", new_key(), reference="wrap").status_code == 201
        finally:
            connection.execute_wrappers.clear()
        [inserted] = [sql for sql in wrapped if "response_status" in sql]
        assert "COMMIT" not in inserted


@pytest.fixture(params=[True, False], ids=["combined", "one by one"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Several statements in a message, and one; the connection is as it was afterwards."""
    hooked.clear()
    if not request.param:
        request.getfixturevalue("one_by_one")
    yield
    connection.ensure_connection()
    driver = connection.connection
    assert (connection.in_atomic_block, connection.get_autocommit()) == (False, True)
    assert (driver.autocommit, driver.info.transaction_status.name) == (True, "IDLE")
    assert connection.execute_wrappers == []
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER IF EXISTS refuse ON tests_effect")
    connection.close()


@pytest.mark.usefixtures("either_way")
class TestEitherWay:
    """However the statements are sent, the operation ends alike."""

    @pytest.mark.parametrize("act", ["dangle", "fail", "deadlock", "serialize", "lost"])
    def test_rolled_back(self, client: Client, act: str) -> None:
        """What the view raises, or the database at COMMIT, rolls back; the key is free."""
        client.raise_request_exception = False
        key = new_key()
        for attempt in (1, 2):
            assert post(client, "/acts/", key, act).status_code >= 409
            assert effects() == 0
            row = IdempotencyKey.objects.filter(key=key).first()
            if act == "lost":  # nobody knows what became of it
                assert row is None
            else:
                assert row is not None
                assert (row.status, row.attempt) == ("failed", attempt)

    def test_unknown_outcome(self, client: Client) -> None:
        """A connection that is lost at COMMIT leaves an outcome that nobody knows."""
        refused = post(client, "/acts/", new_key(), "lost")
        assert (
            "the result is unknown" in assert_problem(refused, 503, "store-unavailable")["detail"]
        )

    @pytest.mark.parametrize(
        ("act", "status", "slug"),
        [
            ("timeout", 503, "store-unavailable"),
            ("read-only", 503, "store-unavailable"),
            ("serialize the response", 409, "in-progress"),
        ],
    )
    def test_refused_response(self, client: Client, act: str, status: int, slug: str) -> None:
        """What is refused before the COMMIT has certainly rolled back, and is recorded as that."""
        key, freed = new_key(), []

        def note(**told: Any) -> None:
            freed.append(told["attempt"])

        signals.failed.connect(note)
        try:
            refused = post(client, "/acts/", key, act)
        finally:
            signals.failed.disconnect(note)
        assert "the result is unknown" not in assert_problem(refused, status, slug)["detail"]
        assert (effects(), freed, record(key).status) == (0, [1], "failed")

    @pytest.mark.parametrize("act", ["hook", "lock", "end"])
    def test_committed(self, client: Client, act: str) -> None:
        """What a view may do in a transaction it may do here."""
        key = new_key()
        first = post(client, "/acts/", key, act)
        assert first.status_code == 201
        assert_replays(first, post(client, "/acts/", key, act))
        assert effects() == 1
        assert hooked == (["completed"] if act == "hook" else [])

    @pytest.mark.parametrize("act", ["close", "mark"])
    def test_nothing_is_committed(self, client: Client, act: str) -> None:
        """A transaction that cannot be committed is not, and its response is none."""
        client.raise_request_exception = False
        assert post(client, "/acts/", new_key(), act).status_code == 500
        assert effects() == 0

    @pytest.mark.parametrize("refusal", [None, "40P01", "08006"])
    def test_fence(self, refusal: str | None) -> None:
        """An owner commits; a late one does not, and what the database refuses is told."""
        store, operation = stores["default"], an_operation(lease=timedelta(milliseconds=1))
        late = as_claim(store.acquire(operation))
        with store.fenced(late):
            Effect.objects.create(reference="a")
        assert effects() == 1
        if refusal is not None:
            with pytest.raises(StoreUnavailable, match="the result is unknown"), store.fenced(late):
                conflict(refusal)()
        eventually(lambda: isinstance(store.acquire(operation), Claim))
        with pytest.raises(ClaimLost), store.fenced(late):
            Effect.objects.create(reference="a")
        assert effects() == 1

    def test_fence_of_a_late_snapshot(self) -> None:
        """Whoever does not see that its claim was taken over has not committed, and is told so."""
        store, operation = stores["default"], an_operation(lease=timedelta(milliseconds=1))
        late = as_claim(store.acquire(operation))

        def take_over() -> None:
            eventually(lambda: isinstance(store.acquire(operation), Claim))

        with pytest.raises(OperationInProgress), store.fenced(late):
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            Effect.objects.create(reference="a")
            in_threads([take_over])
        assert effects() == 0
