"""Fingerprints and derived keys: nothing to guess by, over rotations, and pinned to a request."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.contrib.messaging.consumers import Consumer, Duplicate, Handled
from idempotency_django.contrib.messaging.events import Event
from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import aidempotent_call, idempotent_call
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.policy.digests import canonical, digest, keyed_digests
from idempotency_django.stores.records import Status
from tests.models import Effect
from tests.support.factories import ago
from tests.support.shared import assert_problem, effects, is_replay, new_key, post, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

LEASED = Policy(mode="leased")


def charge(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    derived = request.idempotency.derive_key("charge")  # type: ignore[attr-defined]
    if reference == "fails":
        raise ConnectionError(derived)
    return JsonResponse({"charge": derived}, status=201)


urlpatterns = [
    path("transactional/", idempotent(charge)),
    path("leased/", idempotent(policy=LEASED)(charge)),
]
both = pytest.mark.parametrize("path", ["/transactional/", "/leased/"])


@pytest.fixture
def client() -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(User.objects.create_user("alice"))
    return client


def rotate(settings: Any, *before: str) -> None:
    settings.SECRET_KEY_FALLBACKS = list(before)
    settings.SECRET_KEY = "the secret after the rotation"


class TestSecret:
    @both
    def test_nothing_to_guess_by(self, client: Client, path: str, settings: Any) -> None:
        """Whoever has the table, and not the secret, cannot tell a right guess from a wrong one."""
        key = new_key()
        assert post(client, path, key).status_code == 201
        stolen = record(key).fingerprint
        asked = json.dumps({"reference": "a"}).encode()
        guesses = [asked, canonical(json.loads(asked)), b"json" + asked]
        plain = {hashlib.sha256(guess).hexdigest() for guess in guesses} | set(map(digest, guesses))
        assert stolen not in plain
        # The same request under another key, or another secret, has nothing in common with it.
        for secret in (settings.SECRET_KEY, "somebody else's"):
            settings.SECRET_KEY, other = secret, new_key()
            assert post(client, path, other).status_code == 201
            assert record(other).fingerprint != stolen

    def test_equal_for_equal(self) -> None:
        """The same parts for the same purpose have the same digest; anything else has not."""
        [digest] = keyed_digests("fingerprint", "order", "17")
        assert keyed_digests("fingerprint", "order", "17") == (digest,)
        others = [
            *keyed_digests("fingerprint", "order"),
            *keyed_digests("fingerprint", "order", "17", ""),
            *keyed_digests("fingerprint", "order1", "7"),
            *keyed_digests("owner", "order", "17"),
        ]
        assert len({digest, *others}) == 5
        assert {len(each) for each in (digest, *others)} == {64}

    @both
    def test_derived_keys(self, client: Client, path: str, settings: Any) -> None:
        """Whoever has derived keys, such as the provider, cannot test a guess against them either:
        the same request under the same key has others under another secret.
        """
        key = new_key()
        derived = post(client, path, key).json()["charge"]
        record(key).delete()
        settings.SECRET_KEY = "somebody else's"
        client.force_login(User.objects.get())
        assert post(client, path, key).json()["charge"] != derived


class TestRotation:
    @both
    def test_replay(self, client: Client, path: str, settings: Any) -> None:
        """A retry that crosses a rotation receives the response, and a different request is 422."""
        key = new_key()
        first = post(client, path, key)
        rotate(settings, "tests")
        client.force_login(User.objects.get())
        again = post(client, path, key)
        assert is_replay(again)
        assert again.content == first.content
        assert_problem(post(client, path, key, "b"), 422, "mismatch")
        assert (effects("a"), effects("b")) == (1, 0)

    @both
    def test_derived_key(self, client: Client, path: str, settings: Any) -> None:
        """A rotation between two attempts changes no derived key."""
        key = new_key()
        assert post(client, path, key, "fails").status_code == 500
        errors = {record(key).error}
        for fallbacks in (["tests"], ["another", "tests"]):
            rotate(settings, *fallbacks)
            client.force_login(User.objects.get())
            assert post(client, path, key, "fails").status_code == 500
            errors.add(record(key).error)
        assert record(key).attempt == 3
        (error,) = errors
        assert UUID(error.removeprefix("ConnectionError: ")).version == 5


class TestCalls:
    def test_two_scopes(self) -> None:
        """Nor have equal calls in two scopes anything in common."""
        for scope in "ab":
            idempotent_call(lambda _: 17, key="k", scope=scope, name="pay")
        assert len(set(IdempotencyKey.objects.values_list("fingerprint", flat=True))) == 2

    def test_rotation(self, settings: Any) -> None:
        """A call from plain Python is recognised after a rotation, sync and async."""

        async def fn(_: ExecutionContext) -> int:
            raise AssertionError("executed again")

        given = {"scope": "s", "fingerprint": {"order": 17}, "name": "pay"}
        sync_key, async_key = new_key(), new_key()
        for key in (sync_key, async_key):
            assert idempotent_call(lambda _: 42, key=key, policy=LEASED, **given) == 42
        rotate(settings, "tests")
        again = idempotent_call(lambda _: 43, key=sync_key, policy=LEASED, **given)
        assert again == 42
        acall = async_to_sync(aidempotent_call)
        assert acall(fn, key=async_key, policy=LEASED, **given) == 42
        with pytest.raises(FingerprintMismatch):
            idempotent_call(lambda _: 43, key=sync_key, **given | {"fingerprint": {"order": 18}})

    def test_batch(self, settings: Any) -> None:
        """Events that were handled are duplicates, and one whose attempt was interrupted is handled
        with the keys that it derived.
        """
        derived, consumer = dict[str, list[str]](), Consumer("billing")

        @consumer.on("paid")
        def book(event: Event, execution: ExecutionContext) -> None:
            derived.setdefault(event.id, []).append(execution.derive_key("entry"))

        events = [Event(id=name, source="/shop", type="paid") for name in ("done", "cut", "new")]
        consumer.handle_many(events[:2])
        IdempotencyKey.objects.filter(key="cut").update(
            status=Status.IN_PROGRESS, completed_at=None, lease_expires_at=ago(hours=1)
        )
        rotate(settings, "tests")
        outcomes = consumer.handle_many(events)
        assert [type(outcome) for outcome in outcomes] == [Duplicate, Handled, Handled]
        assert {name: len(keys) for name, keys in derived.items()} == {
            "done": 1,
            "cut": 2,
            "new": 1,
        }
        assert len(set(derived["cut"])) == 1
        assert consumer.handle_many(events)[1:] == [Duplicate(None), Duplicate(None)]


# A key whose attempt may have charged somebody belongs to its request, whatever became of it.


charged: dict[str, int] = {}
"""What the provider has charged, by its own idempotency keys, which it never charges twice."""
down: list[bool] = []
"""Whether what comes after the charge fails."""
busy: list[bool] = []
"""Whether nothing is charged at all."""


@pytest.fixture(autouse=True)
def _provider() -> None:
    charged.clear()
    down.clear()
    busy.clear()


def order(request: HttpRequest) -> HttpResponse:
    """Charge somebody, and fail afterwards where the test says so."""
    amount = json.loads(request.body)["amount"]
    if busy:
        return JsonResponse({}, status=503)  # before anything was done
    derived = request.idempotency.derive_key("charge")  # type: ignore[attr-defined]
    paid = charged.setdefault(derived, amount)
    if down:
        raise ConnectionError
    return JsonResponse({"charged": paid}, status=201)


urlpatterns += [
    path("order/transactional/", idempotent(order)),
    path("order/leased/", idempotent(mode="leased")(order)),
]


def pay(client: Client, url: str, key: str, amount: int) -> HttpResponse:
    return client.post(
        url, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": key}
    )


@pytest.mark.parametrize("url", ["/order/transactional/", "/order/leased/"])
def test_another_order(client: Client, url: str) -> None:
    """If an order fails after its charge, another one under its key is refused, and never given the
    first one's charge; the first goes on.
    """
    key = new_key()
    down.append(True)
    assert pay(client, url, key, 500).status_code == 500
    assert record(key).status == Status.FAILED
    down.clear()
    assert_problem(pay(client, url, key, 700), 422, "mismatch")
    assert list(charged.values()) == [500]
    retry = pay(client, url, key, 500)
    assert (retry.status_code, json.loads(retry.content)) == (201, {"charged": 500})
    assert is_replay(pay(client, url, key, 500))


@pytest.mark.parametrize("url", ["/order/transactional/", "/order/leased/"])
def test_nothing_derived(client: Client, url: str) -> None:
    """An attempt that failed before it could have charged leaves its key free for any request."""
    key = new_key()
    busy.append(True)
    assert pay(client, url, key, 500).status_code == 503
    busy.clear()
    assert pay(client, url, key, 700).status_code == 201
    assert list(charged.values()) == [700]
