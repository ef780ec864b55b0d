"""What projects test with: clients with keys, assertions, races and crashes."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, override_settings
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import Policy, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.testing import (
    IdempotentAPIClient,
    IdempotentTestClient,
    assert_replayed,
    crash,
    race,
)
from idempotency_django.testing.writes import rehearsal, table_written
from tests.models import Effect
from tests.settings import ALIASES
from tests.support.shared import new_key

pytestmark = pytest.mark.urls(__name__)


@csrf_exempt
@idempotent
def charge(request: HttpRequest) -> HttpResponse:
    Effect.objects.using(request.GET.get("using", "default")).create(reference="a")
    return HttpResponse(request.body, "text/plain", status=201)


@csrf_exempt
def careless(request: HttpRequest) -> HttpResponse:
    using = request.GET.get("using", "default")
    Effect.objects.using(using).create(reference="a")
    return HttpResponse(Effect.objects.using(using).count(), "text/plain", status=201)


@csrf_exempt
@idempotent(mode="leased")
def leased(request: Any) -> HttpResponse:
    request.idempotency.step("book", lambda: Effect.objects.create(reference="a").pk)
    return HttpResponse(status=201)


@csrf_exempt
def nothing(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=409 if request.method == "PUT" else 204)


class ChargeView(IdempotentViewMixin, APIView):
    authentication_classes = ()
    permission_classes = ()
    idempotency_policy = Policy(required=True)

    def post(self, request: Any) -> Response:
        return Response({"id": Effect.objects.create(reference="a").pk}, status=201)


urlpatterns = [
    path("charge/", charge),
    path("careless/", careless),
    path("leased/", leased),
    path("nothing/", nothing),
    path("drf/", ChargeView.as_view()),
]


# Clients and assertions.


@override_settings(ROOT_URLCONF=__name__)
class ClientTests(TestCase):
    """Without pytest."""

    client_class = IdempotentTestClient
    client: IdempotentTestClient

    def test_retry(self) -> None:
        """Each request has a new key; retry() sends the last one again."""
        self.client.post("/charge/", {"amount": 1})
        first = self.client.post("/charge/", {"amount": 2})
        self.client.get("/missing/")
        assert_replayed(first, self.client.retry())
        assert_replayed(first, self.client.retry())
        assert Effect.objects.count() == 2

    def test_own_key(self) -> None:
        """A key of the request, or of all of the client's, is kept."""
        for client in (self.client, IdempotentTestClient(headers={"Idempotency-Key": new_key()})):
            headers = {"Idempotency-Key": new_key()} if client is self.client else {}
            first = client.post("/charge/", headers=headers)
            assert_replayed(first, client.post("/charge/", headers=headers))

    def test_no_retry(self) -> None:
        """Without an unsafe request, or with a body of its own, there is nothing to send again."""
        self.client.get("/missing/")
        with self.assertRaisesMessage(ValueError, "Send a POST"):
            self.client.retry()
        environ = {"PATH_INFO": "/charge/", "wsgi.input": BytesIO(), "CONTENT_LENGTH": "0"}
        self.client.request(REQUEST_METHOD="POST", **environ)
        with self.assertRaisesMessage(ValueError, "must not be a stream"):
            self.client.retry()

    def test_not_replayed(self) -> None:
        """The assertion shows what is different."""
        first = self.client.post("/careless/")
        with self.assertRaisesMessage(AssertionError, "no header Idempotent-Replayed, and its bo"):
            assert_replayed(first, self.client.retry())
        with self.assertRaisesMessage(AssertionError, "its status is 204, not 201: ''"):
            assert_replayed(first, self.client.post("/nothing/"))

    def test_rest_framework(self) -> None:
        """The same for REST framework's client; a replay and a refusal have their data."""
        client = IdempotentAPIClient()
        first = client.post("/drf/", {"amount": 1}, format="json")
        assert_replayed(first, client.retry())
        assert client.retry().data == first.data
        assert isinstance(client.retry(), Response)
        refused = Client().post("/drf/")
        assert isinstance(refused, Response)
        assert "key" in refused.data["detail"]


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("name", ALIASES)
def test_rehearsal(name: str) -> None:
    """What is written is noted and undone; what is rolled back, or changes no row, is not noted."""
    using = ALIASES[name]
    effects = Effect.objects.using(using)
    list(effects.all())  # over a connection that is open
    with rehearsal() as noted:
        with transaction.atomic(using=using):
            effects.create(reference="a")
            transaction.set_rollback(True, using=using)
        effects.filter(reference="missing").delete()
        effects.filter(reference="missing").update(reference="b")
    assert noted == []
    with rehearsal() as noted:
        effects.create(reference="a")
        with transaction.atomic(using=using):
            effects.update(reference="b")
            transaction.set_rollback(True, using=using)
    [written] = noted
    assert table_written(written) == "tests_effect"
    assert not effects.exists()


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("INSERT IGNORE INTO `shop_charge` VALUES (1)", "shop_charge"),
        ("\n  replace into shop_charge values (1)", "shop_charge"),
        ('UPDATE OR IGNORE "public"."shop_charge" SET "a" = 1', "shop_charge"),
        ('DELETE FROM ONLY "shop_charge"', "shop_charge"),
        ('SELECT 1 FROM "shop_charge" FOR UPDATE', None),
        ("-- INSERT INTO shop_charge", None),
    ],
    ids=lambda text: text and text[:40],
)
def test_table_written(sql: str, table: str | None) -> None:
    """A statement's table is found if it writes; locking a row is no write."""
    assert table_written(sql) == table


# Races and crashes.


def sender(where: str) -> Callable[[], Any]:
    key = new_key()
    return lambda: Client().post(where, headers={"Idempotency-Key": key})


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("name", ALIASES)
def test_race(name: str) -> None:
    """A protected view is executed once, and a careless one each time."""
    query = f"?using={ALIASES[name]}"
    if ALIASES[name] == "default":
        result = race(sender("/charge/"), n=4)
        assert (result.executed, result.errors) == (1, [])
        assert len(result.responses) == 4
        assert Effect.objects.count() == 1
    assert race(sender(f"/careless/{query}"), n=3).executed == 3


def test_race_fixture(idempotency_race: Callable[..., Any]) -> None:
    """The fixture is the function, in a test that commits. What is raised is kept."""
    results = iter([ValueError("no"), HttpResponse(status=400), None])

    def send() -> Any:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    raced = idempotency_race(send, n=3)
    assert (raced.executed, len(raced.errors), len(raced.responses)) == (1, 1, 2)


@pytest.mark.parametrize("at", ["before-effect", "after-effect", "after-commit"])
def test_crash(at: Any, idempotency_crash: Callable[..., Any]) -> None:
    """After a crash at any moment, the retry has the effect, or replays it."""
    response = idempotency_crash(sender("/charge/"), at=at)
    assert response.status_code == 201
    assert ("Idempotent-Replayed" in response) == (at == "after-commit")
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_crash_of_leased() -> None:
    """The lease of the process that died has ended for the retry."""
    assert crash(sender("/leased/")).status_code == 201
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_crash_shows_a_bug() -> None:
    """A view that commits by itself does it twice."""
    crash(sender("/careless/"), at="after-commit")
    assert Effect.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_crash_while_busy() -> None:
    """A response 409 is asked again, ten times at most."""
    sent, mine = [], os.getpid()

    def send() -> HttpResponse:
        sent.append(1)
        return Client().put("/nothing/") if os.getpid() == mine else Client().post("/nothing/")

    assert crash(send, at="after-commit").status_code == 409
    assert len(sent) == 10  # and one in the process that died


@pytest.mark.django_db
@pytest.mark.parametrize("tried", [race, crash])
def test_transaction(tried: Any) -> None:
    """In a transaction, other connections would not see the test's data."""
    with pytest.raises(ImproperlyConfigured, match=r"of (race|crash)\(\) do not see"):
        tried(sender("/charge/"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("tried", [race, crash])
def test_in_memory(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is true of a database in memory."""
    monkeypatch.setattr(connection, "is_in_memory_db", lambda: True, raising=False)
    with pytest.raises(ImproperlyConfigured, match=r"Use a file for tests"):
        tried(sender("/charge/"))
