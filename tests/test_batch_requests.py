"""Batch requests: each item runs once per key of its own, whatever becomes of the others."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connection, transaction
from django.test import Client, override_settings
from django.urls import path
from rest_framework import serializers
from rest_framework.authentication import SessionAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import APIView

from idempotency_django import idempotent, idempotent_call
from idempotency_django.drf import IdempotentViewMixin, idempotent_items
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, keys, store_errors, store_only
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support import effect_counts, effects, is_replay, new_key, record
from tests.ways import MIDDLEWARE

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Batch(APIView):
    """A list of references; some of them fail."""

    authentication_classes: ClassVar[list[Any]] = [SessionAuthentication]
    item_policy = Policy()

    def post(self, request: Request) -> Response:
        """Execute the items."""
        return Response(idempotent_items(self, self.create, policy=self.item_policy), status=207)

    def create(self, item: Any) -> Response:
        """Execute one item."""
        reference = item["reference"]
        Effect.objects.create(reference=reference)
        if reference == "invalid":
            raise serializers.ValidationError({"reference": ["wrong"]})
        if reference == "boom":
            raise LookupError("boom")
        if reference == "calls":
            idempotent_call(lambda _: None, key="k", scope="s", fingerprint=Effect.objects.count())
        if reference == "killed":
            raise SystemExit
        if reference == "nan":
            return Response({"rate": float("nan")})
        if reference == "wrong":
            return Response({"reference": {object()}})
        status = int(reference) if reference.isdigit() else 201
        return Response({"reference": reference, "number": Effect.objects.count()}, status=status)


class Protected(IdempotentViewMixin, Batch):
    """A batch that is protected itself, too."""


class Temporary(Batch):
    """Its items may fail while a fault is there."""

    faults: ClassVar[set[str]] = set()

    def create(self, item: Any) -> Response:
        """Execute one item."""
        response = super().create(item)
        if item["reference"] == "paused":  # another request comes and goes
            Meeting.both.wait()
            Meeting.both.wait()
        if "raises" in self.faults and item["reference"] == "flaky":
            raise LookupError("flaky")
        if "ends" in self.faults and item["reference"] == "last":
            raise SystemExit
        if "rolls back" in self.faults and item["reference"] == "flaky":
            transaction.set_rollback(True)
            return Response(status=400)
        if "unavailable" in self.faults and item["reference"] in ("flaky", "last"):
            return Response(status=503)
        return response


def leased(view: type[Batch]) -> Any:
    """The view, which is protected in the leased mode."""
    return type("Leased", (IdempotentViewMixin, view), {"idempotency_policy": LEASED})


LEASED = Policy(mode="leased")
PROTECTED = {
    "mixin": type("Mixed", (IdempotentViewMixin, Temporary), {}),
    "leased": leased(Temporary),
    "decorator": idempotent(type("Decorated", (Temporary,), {})),
    "middleware": type("Plain", (Temporary,), {}),
}


class Strict(Batch):
    """Stores responses with one status only."""

    item_policy = Policy(should_store=store_only(201))


class Never(Batch):
    """Stores nothing."""

    item_policy = Policy(should_store=lambda request, response: False)


class Derives(Batch):
    """Needs its execution."""

    def create(self, item: Any) -> Response:
        """Execute one item."""
        return Response(str(self.request.idempotency.derive_key("charge")))


class Withdrawn(Batch):
    """Refuses replays."""

    @staticmethod
    def check(request: Request, record: Any) -> None:
        """Refuse it."""
        raise PermissionDenied

    item_policy = Policy(check_replay=check)


class Locking(leased(Batch)):  # type: ignore[misc]
    """Needs the transaction of ATOMIC_REQUESTS before its items."""

    def post(self, request: Request) -> Response:
        """Execute the items, with a lock on what they belong to."""
        list(User.objects.select_for_update())
        assert connection.in_atomic_block
        return super().post(request)  # type: ignore[no-any-return]


class Around(Batch):
    """Uses its own execution, outside of the items."""

    def post(self, request: Request) -> Response:
        """Execute the items, as a part of a larger operation."""
        execution: Any = self.request.idempotency
        derived = str(execution.derive_key("notify"))
        execution.resource = User.objects.get_or_create(username="buyer")[0]
        if execution.operation.lease is not None:
            execution.step("notify", lambda: 1)
        response: Response = super().post(request)
        return Response([*response.data, {"status": derived, "replayed": None}], status=207)


class Meeting(Batch):
    """Two requests meet before each item."""

    both: ClassVar[threading.Barrier]

    def create(self, item: Any) -> Response:
        """Execute one item, once the other request is at one."""
        self.both.wait()
        return super().create(item)


urlpatterns = [
    *(path(f"{way}/", view.as_view()) for way, view in PROTECTED.items()),
    path("batch/", Batch.as_view()),
    path("protected/", Protected.as_view()),
    path("around/", type("Mixed", (IdempotentViewMixin, Around), {}).as_view()),
    path("leased-around/", leased(Around).as_view()),
    path("strict/", Strict.as_view()),
    path("withdrawn/", Withdrawn.as_view()),
    path("never/", Never.as_view()),
    path("derives/", Derives.as_view()),
    path("meeting/", Meeting.as_view()),
    path("locking/", Locking.as_view()),
]


def item(reference: str, key: str | None = None) -> dict[str, Any]:
    """An item of a batch."""
    return {"reference": reference, "idempotency_key": key or new_key()}


def send(items: Any, where: str = "batch", client: Client | None = None, **headers: str) -> Any:
    """Send a batch; the entries of the answer."""
    response = (client or Client()).post(
        f"/{where}/", json.dumps(items), "application/json", headers=headers
    )
    assert response.status_code == 207, response.content
    return response.json()


def outcomes(entries: Any) -> list[tuple[int, bool]]:
    """The status of each entry, and whether it is a replay."""
    return [(each["status"], each["replayed"]) for each in entries]


def test_a_retry() -> None:
    """It gets the responses of the first request, in its own order, and executes what is new."""
    a, b, c = item("a"), item("b"), item("c")
    first = send([a, b])
    assert outcomes(first) == [(201, False), (201, False)]
    assert first[0]["body"] == {"reference": "a", "number": 1}
    again = send([c, b, a])
    assert outcomes(again) == [(201, False), (201, True), (201, True)]
    assert [each["body"] for each in again[1:]] == [each["body"] for each in first[::-1]]
    assert effect_counts() == {"a": 1, "b": 1, "c": 1}
    assert record(a["idempotency_key"]).operation == "item of POST /batch/"


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("bad", ["invalid", "boom", "503", "wrong", "nan", "429"])
def test_a_failed_item(bad: str, atomic: bool) -> None:
    """It is rolled back alone, also within ATOMIC_REQUESTS; a retry executes it again."""
    items = [item("a"), item(bad), item("b")]
    status = {"invalid": 400, "429": 429, "503": 503}.get(bad, 500)
    connection.settings_dict["ATOMIC_REQUESTS"] = atomic
    try:
        for replayed in (False, True):
            entries = send(items)
            assert outcomes(entries) == [(201, replayed), (status, False), (201, replayed)]
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert effect_counts() == {"a": 1, "b": 1}
    assert record(items[1]["idempotency_key"]).attempt == 2
    assert "Traceback" not in str(entries)


def test_no_strict_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where REST framework renders numbers that are not JSON, an item may have them, too."""
    monkeypatch.setattr(api_settings, "STRICT_JSON", False)
    monkeypatch.setattr(JSONRenderer, "strict", False)
    items = [item("nan")]
    assert [outcomes(send(items)) for _ in range(2)] == [[(200, False)], [(200, True)]]


def test_an_unexpected_error_is_logged(caplog: Any) -> None:
    """The log has its traceback; the client is told no more than of any server error."""
    [entry] = send([item("boom")])
    assert entry["body"] == {"detail": "A server error occurred."}
    [logged] = [each for each in caplog.records if each.name == "idempotency_django"]
    assert "An item of the batch /batch/ failed" in logged.message
    assert logged.exc_info[0] is LookupError


def test_an_error_of_another_operation() -> None:
    """A refusal of a nested call is no refusal of the item's own key."""
    entries = send([item("calls"), item("calls")])
    assert outcomes(entries) == [(201, False), (500, False)]
    assert entries[1]["body"] == {"detail": "A server error occurred."}


def test_stored_errors() -> None:
    """A returned 4xx is stored; the policy's should_store decides for any response."""
    items = [item("422")]
    assert outcomes(send(items)) == [(422, False)]
    assert outcomes(send(items)) == [(422, True)]
    assert effects("422") == 1
    items = [item("422"), item("201")]
    assert outcomes(send(items, "strict")) == [(422, False), (201, False)]
    assert outcomes(send(items, "strict")) == [(422, False), (201, True)]
    assert outcomes(send([item("a")], "never")) == [(201, False)]
    assert effects() == 0


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (Policy(on_replay=lambda request, response: response), "on_replay"),
        (Policy(rebuild=lambda record, request: Response()), "rebuild"),
        (Policy(replay_status={201: 200}), "replay_status"),
        (Policy(should_store=store_errors), "should_store=store_errors"),
        (Policy(mode="leased", on_conflict="accepted"), "on_conflict='accepted'"),
    ],
)
def test_fields_without_effect(policy: Policy, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy says about the response of a request is refused for items."""
    monkeypatch.setattr(Batch, "item_policy", policy)
    with pytest.raises(ImproperlyConfigured, match=rf"idempotent_items\(\) has {named}\."):
        send([item("a")])
    assert effects() == 0


def test_fields_of_the_project() -> None:
    """The project's policy may have them, for its views."""
    with override_settings(IDEMPOTENCY={"POLICY": {"should_store": store_errors}}):
        assert outcomes(send([item("a")])) == [(201, False)]


def test_a_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused item has the status and the body of its policy's dialect."""
    monkeypatch.setattr(Batch, "item_policy", Policy(dialect="stripe"))
    a = item("a")
    entries = send([a, {**a, "reference": "b"}])
    assert outcomes(entries) == [(201, False), (400, False)]
    assert entries[1]["body"]["error"]["type"] == "idempotency_error"


def test_the_execution() -> None:
    """An item is executed with its own execution as ``request.idempotency``."""
    first, second = send([item("a"), item("b")], "derives")
    assert (first["status"], second["status"]) == (200, 200)
    assert first["body"] != second["body"]


def test_a_killed_request() -> None:
    """What was done before it stays done, and the retry does the rest."""
    items = [item("a"), item("killed"), item("b")]
    with pytest.raises(SystemExit):
        send(items)
    assert effect_counts() == {"a": 1}
    items[1]["reference"] = "c"  # the fault is gone; the claim was rolled back with its record
    assert outcomes(send(items)) == [(201, True), (201, False), (201, False)]


def test_duplicates_in_one_batch() -> None:
    """The second gets the response of the first; another item with its key is refused."""
    a = item("a")
    other = {**a, "reference": "b"}
    entries = send([a, a, other])
    assert outcomes(entries) == [(201, False), (201, True), (422, False)]
    assert entries[2]["body"]["code"] == "mismatch"
    assert entries[2]["body"]["detail"] == FingerprintMismatch.default_detail
    assert effect_counts() == {"a": 1}


@pytest.mark.parametrize(
    ("odd", "status", "code"),
    [
        ({"reference": "a"}, 400, "key-missing"),
        ({"reference": "a", "idempotency_key": 7}, 400, "key-malformed"),
        ({"reference": "a", "idempotency_key": "x y\n"}, 400, "key-malformed"),
        ({"reference": "a", "idempotency_key": "short"}, 400, "key-guessable"),
        ("a", 400, None),
    ],
)
def test_odd_items(odd: Any, status: int, code: str | None) -> None:
    """An item without a usable key is refused, and the others are executed."""
    entries = send([odd, item("b")])
    assert outcomes(entries) == [(status, False), (201, False)]
    assert entries[0]["body"].get("code") == code
    assert effect_counts() == {"b": 1}


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_key(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the member of the item, also if the policy requires a key."""
    monkeypatch.setattr(Batch, "item_policy", Policy(required=required))
    [entry] = send([{"reference": "a"}])
    assert entry["body"]["detail"].startswith("This item has no 'idempotency_key'. Send a new")


def test_a_missing_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the key is made of fields of the item, the refusal says so."""
    policy = Policy(required=True, key=keys.instead_of_header(keys.natural("order")))
    monkeypatch.setattr(Batch, "item_policy", policy)
    [entry] = send([{"reference": "a"}])
    assert "a field is missing" in entry["body"]["detail"]


def test_no_list(client: Client) -> None:
    """A body that is no list is refused as a whole."""
    assert client.post("/batch/", "{}", "application/json").status_code == 400


def test_too_large() -> None:
    """A response that is not kept is not sent again; the item is not executed again either."""
    Batch.item_policy, before = Policy(max_response_bytes=5), Batch.item_policy
    try:
        items = [item("a")]
        assert outcomes(send(items)) == [(201, False)]
        [entry] = send(items)
    finally:
        Batch.item_policy = before
    assert entry["body"]["code"] == "response-not-stored"
    assert effects() == 1


def test_callers() -> None:
    """An item's response goes only to its caller, who is the request's."""
    alice, bob = Client(), Client()
    alice.force_login(User.objects.create_user("alice"))
    bob.force_login(User.objects.create_user("bob"))
    items = [item("a", "order-1")]
    assert outcomes(send(items, client=alice)) == [(201, False)]
    assert outcomes(send(items, client=bob)) == [(201, False)]
    assert outcomes(send(items, client=alice)) == [(201, True)]
    assert effects() == 2


def test_check_replay() -> None:
    """The policy's check_replay refuses the replay of an item."""
    items = [item("a")]
    send(items, "withdrawn")
    assert outcomes(send(items, "withdrawn")) == [(403, False)]
    assert effects() == 1


def test_a_protected_batch() -> None:
    """A key of the request is one more guarantee; the items keep theirs."""
    items, key = [item("a"), item("b")], new_key()
    first = send(items, "protected", **{"Idempotency-Key": key})
    assert send(items, "protected", **{"Idempotency-Key": key}) == first
    again = send(items, "protected", **{"Idempotency-Key": new_key()})
    assert outcomes(again) == [(201, True), (201, True)]
    assert effect_counts() == {"a": 1, "b": 1}
    assert IdempotencyKey.objects.count() == 4


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("fault", ["raises", "rolls back", "unavailable"])
@pytest.mark.parametrize("way", PROTECTED)
def test_a_temporary_failure(way: str, fault: str, atomic: bool) -> None:
    """A retry with the key of the request, too, executes what has failed, and nothing else."""
    items = [item("a"), item("flaky"), item("b")]
    headers = {"Idempotency-Key": new_key()}
    status = {"raises": 500, "rolls back": 400, "unavailable": 503}[fault]
    rounds = [(status, False), (status, False), (201, False), (201, True)]
    connection.settings_dict["ATOMIC_REQUESTS"] = atomic
    try:
        for number, (expected, replayed) in enumerate(rounds):
            Temporary.faults = {fault} if expected == status else set()
            with override_settings(MIDDLEWARE=MIDDLEWARE):
                response = Client().post(
                    f"/{way}/", json.dumps(items), "application/json", headers=headers
                )
            done = (201, number > 0)
            assert outcomes(response.json()) == [done, (expected, replayed), done]
            assert response["Idempotency-Status"] == "executed; stored=?0"
            assert not is_replay(response)
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
        Temporary.faults = set()
    assert effect_counts() == {"a": 1, "flaky": 1, "b": 1}


@pytest.mark.parametrize("way", PROTECTED)
def test_a_retry_that_is_cut_off(way: str) -> None:
    """A process that ends while the view runs again keeps what was done, and repeats nothing."""
    items, key = [item("flaky"), item("last")], {"Idempotency-Key": new_key()}
    with override_settings(MIDDLEWARE=MIDDLEWARE):
        try:
            for fault in ("unavailable", "ends", ""):
                Temporary.faults = {fault}
                with pytest.raises(SystemExit) if fault == "ends" else nullcontext():
                    send(items, way, **key)
                assert effects("flaky") == (fault != "unavailable")
        finally:
            Temporary.faults = set()
        assert outcomes(send(items, way, **key)) == [(201, True), (201, True)]
    assert effect_counts() == {"flaky": 1, "last": 1}


def test_another_batch_with_the_key() -> None:
    """The key of a request that is to run again is refused for another list, as any other."""
    key = {"Idempotency-Key": new_key()}
    assert outcomes(send([item("boom")], "protected", **key)) == [(500, False)]
    response = Client().post(
        "/protected/", json.dumps([item("a")]), "application/json", headers=key
    )
    assert response.status_code == 422
    assert effects() == 0


@pytest.mark.parametrize("where", ["around", "leased-around"])
def test_the_execution_of_the_whole(where: str) -> None:
    """A view that runs again finds an execution there, with the same key for other services."""
    key, items = {"Idempotency-Key": new_key()}, [item("503"), item("a")]
    first, again = (send(items, where, **key) for _ in range(2))
    assert outcomes(first)[:2] == [(503, False), (201, False)]
    assert outcomes(again)[:2] == [(503, False), (201, True)]
    assert first[2] == again[2]
    assert effects("a") == 1


def test_atomic_requests_again() -> None:
    """A leased batch runs again in the transactions of ATOMIC_REQUESTS, as the first time."""
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    key, items = {"Idempotency-Key": new_key()}, [item("503")]
    try:
        for _ in range(2):
            assert outcomes(send(items, "locking", **key)) == [(503, False)]
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False


@pytest.mark.usefixtures("_writers")
@pytest.mark.parametrize("where", ["mixin", "leased"])
def test_an_item_in_progress(where: str) -> None:
    """An item that another request was executing is replayed to the retry, or executed by it."""
    Meeting.both = threading.Barrier(2, timeout=60)
    paused, other = item("paused"), item("b")
    key = {"Idempotency-Key": new_key()}

    def meanwhile() -> Any:
        Meeting.both.wait()  # it is being executed
        try:
            return send([paused, other], where, **key)
        finally:
            Meeting.both.wait()

    _, entries = in_threads([lambda: send([paused], where), meanwhile])
    assert outcomes(entries) == [(409, False), (201, False)]
    assert outcomes(send([paused, other], where, **key)) == [(201, True), (201, True)]
    assert effect_counts() == {"paused": 1, "b": 1}


@pytest.mark.usefixtures("_writers")
@pytest.mark.parametrize("where", ["mixin", "leased"])
def test_retries_at_once(where: str) -> None:
    """Retries of a batch that has failed in part: each item is executed once."""
    items, key = [item("a"), item("flaky"), item("b")], {"Idempotency-Key": new_key()}
    Temporary.faults = {"raises"}
    send(items, where, **key)
    Temporary.faults = set()

    def retry() -> Any:
        entries = send(items, where, **key)
        while any(each["status"] == 409 for each in entries):
            entries = send(items, where, **key)
        return entries

    for entries in in_threads([retry] * 4):
        assert [each["status"] for each in entries] == [201] * 3
    assert effect_counts() == {"a": 1, "flaky": 1, "b": 1}


@pytest.fixture
def _writers() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")


@pytest.mark.usefixtures("_writers")
def test_the_same_items_in_another_order() -> None:
    """Two requests at once, each in the middle of an item that the other has next: no deadlock."""
    a, b = item("a"), item("b")
    Meeting.both = threading.Barrier(2, timeout=60)
    one, two = in_threads(
        [lambda: _until_done([a, b], "meeting"), lambda: _until_done([b, a], "meeting")]
    )
    assert {each["status"] for each in one + two} == {201}
    assert effect_counts() == {"a": 1, "b": 1}


def _until_done(items: Any, where: str) -> Any:
    """Send a batch, and again while an item is in progress elsewhere."""
    entries = send(items, where)
    while any(each["status"] == 409 for each in entries):
        entries = send(items, where)
    return entries


@pytest.mark.soak
@pytest.mark.usefixtures("_writers")
def test_a_storm() -> None:
    """Many requests with the same items in many orders: each item once."""
    items = [item(f"{number}x") for number in range(10)]
    orders = [items[n:] + items[:n] for n in range(10)]
    for entries in in_threads([lambda each=each: _until_done(each, "batch") for each in orders]):
        assert {each["status"] for each in entries} == {201}
    assert set(effect_counts().values()) == {1}
    assert len(effect_counts()) == 10
