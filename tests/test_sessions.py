"""What a view writes to the session is committed with the view's effects, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

import pytest
from django.contrib import messages
from django.contrib.admin.models import LogEntry
from django.contrib.auth import login
from django.contrib.auth.models import User
from django.contrib.sessions.backends.cached_db import KEY_PREFIX
from django.core.cache import cache
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support import effects, is_replay, new_key, post

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("atomic"),
]

ENGINES = [f"django.contrib.sessions.backends.{name}" for name in ("db", "cached_db")]


class Killed(BaseException):
    """Stands for a worker that dies, of which no middleware learns."""


def dies() -> None:
    raise Killed


def buy(request: HttpRequest) -> HttpResponse:
    """Counts in the session, and ends as it is told to."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    request.session["bought"] = request.session.get("bought", 0) + 1
    request.session["basket"]["items"] = []
    request.session.modified = True
    if reference == "dies":
        transaction.on_commit(dies)
    if reference == "login":
        login(request, User.objects.get())
    return JsonResponse(
        {"bought": request.session["bought"]},
        status=409 if reference in ("fails", "login") else 201,
    )


def begins(request: HttpRequest) -> HttpResponse:
    request.session["begun"] = True
    return JsonResponse({}, status=201)


def refused_at_commit() -> int:
    """A deferred constraint, where the database has them, fails at COMMIT."""
    LogEntry.objects.create(user_id=10**6, object_repr="", action_flag=1)
    return 201


def refused_and_marked() -> int:
    transaction.set_rollback(True)
    return 422


def claim_lost() -> int:
    IdempotencyKey.objects.all().delete()
    return 201


ENDINGS = [refused_at_commit, refused_and_marked, claim_lost]


def late(request: HttpRequest) -> HttpResponse:
    """Has ended when its attempt turns out to be rolled back."""
    request.session["bought"] = 1
    messages.success(request, "You bought it")
    Effect.objects.create(reference="a")
    named = {ending.__name__: ending for ending in ENDINGS}
    status = named[json.loads(request.body)["reference"]]()
    return JsonResponse({}, status=status)


def congratulates(request: HttpRequest) -> HttpResponse:
    """Tells the next page of what is rolled back."""
    messages.success(request, "You bought it")
    return JsonResponse({}, status=503)


def shown(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"messages": [str(message) for message in messages.get_messages(request)]})


def after(
    view: Callable[[HttpRequest], HttpResponse], before: Callable[[HttpRequest], None]
) -> Callable[[HttpRequest], HttpResponse]:
    """A view, called after what a decorator around it does."""

    @wraps(view)
    def called(request: HttpRequest) -> HttpResponse:
        before(request)
        return view(request)

    return called


def sees(request: HttpRequest) -> None:
    request.session["seen"] = [1]
    messages.info(request, "Hello")


def holds_what_cannot_be_copied(request: HttpRequest) -> None:
    request.session._session["lock"] = Lock()  # which nobody saves: it is no modification


def forgets_again(request: HttpRequest) -> HttpResponse:
    """Fails, after it has written into what the session holds."""
    request.session["seen"].append(2)
    messages.info(request, "You bought it")
    return JsonResponse({}, status=409)


def read_meanwhile(request: HttpRequest) -> HttpResponse:
    """Another request reads the session, and caches it, while this one is about to commit."""
    former = dict(request.session)
    request.session["bought"] = 1

    def reading(execute: Any, sql: str, *arguments: Any) -> Any:
        if sql.startswith("UPDATE") and IdempotencyKey._meta.db_table in sql:
            connection.execute_wrappers.remove(reading)
            cache.set(f"{KEY_PREFIX}{request.session.session_key}", former)
        return execute(sql, *arguments)

    connection.execute_wrappers.insert(0, reading)
    return JsonResponse({}, status=201)


def dying(view: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """A worker that dies before Django's middleware saves the session."""

    @wraps(view)
    def called(request: HttpRequest) -> HttpResponse:
        view(request)
        raise Killed

    return called


class Turning:
    """Makes a conflict of what the database refuses."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse:
        assert isinstance(error, IntegrityError)
        return JsonResponse({}, status=409)


urlpatterns = [
    path("late/", idempotent(late)),
    path("congratulates/", idempotent(congratulates)),
    path("shown/", shown),
    path("seen/", after(idempotent(forgets_again), sees)),
    path("uncopied/", after(idempotent(congratulates), holds_what_cannot_be_copied)),
    path("read-meanwhile/", dying(idempotent(read_meanwhile))),
    path("buy/", idempotent(buy)),
    path("begins/", idempotent(begins)),
    path("leased/", idempotent(mode="leased")(buy)),
]


@pytest.fixture(params=ENGINES)
def shopper(request: pytest.FixtureRequest, client: Client, settings: Any) -> Client:
    """A client with a session that has a basket."""
    settings.SESSION_ENGINE = request.param
    session = client.session
    session["basket"] = {"items": ["tea"]}
    session.save()
    return client


def test_worker_that_dies(shopper: Client) -> None:
    """Where the effects are committed, what the session says of them is."""
    key = new_key()
    with pytest.raises(Killed):
        post(shopper, "/buy/", key, "dies")
    retried = post(shopper, "/buy/", key, "dies")
    assert is_replay(retried)
    assert retried.json() == {"bought": 1}
    assert effects("dies") == 1
    assert (shopper.session["bought"], shopper.session["basket"]) == (1, {"items": []})


@pytest.mark.parametrize("reference", ["fails", "login"])
def test_rolled_back(shopper: Client, reference: str) -> None:
    """Where the effects are rolled back, so is what the session says of them."""
    User.objects.create(username="bob")
    for _ in range(2):
        assert post(shopper, "/buy/", new_key(), reference).status_code == 409
        assert dict(shopper.session) == {"basket": {"items": ["tea"]}}
    assert effects(reference) == 0


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("new", [True, False], ids=["new session", "session"])
def test_rolled_back_late(
    shopper: Client, settings: Any, ending: Callable[[], int], *, new: bool
) -> None:
    """So they are where the attempt is rolled back when the view has ended."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Turning"]
    settings.IDEMPOTENCY = {"STATUS_CODES": {"claim-lost": 409}}
    visitor = Client() if new else shopper
    assert post(visitor, "/late/", new_key(), ending.__name__).status_code in (409, 422)
    assert effects() == 0
    assert dict(visitor.session) == ({} if new else {"basket": {"items": ["tea"]}})
    assert visitor.get("/shown/").json() == {"messages": []}


def test_messages(client: Client) -> None:
    """What an attempt that is rolled back tells the next page is not shown."""
    assert post(client, "/congratulates/", new_key()).status_code == 503
    assert client.get("/shown/").json() == {"messages": []}


def test_written_before_the_view(client: Client, settings: Any) -> None:
    """What a decorator has written before the attempt is kept, as it was then."""
    settings.SESSION_ENGINE = ENGINES[0]
    assert post(client, "/seen/", new_key()).status_code == 409
    assert client.session["seen"] == [1]
    assert client.get("/shown/").json() == {"messages": ["Hello"]}


def test_not_copied(shopper: Client) -> None:
    """A session that nobody has written to is read again, not copied."""
    assert post(shopper, "/uncopied/", new_key()).status_code == 503
    assert dict(shopper.session) == {"basket": {"items": ["tea"]}}


def test_cached_meanwhile(shopper: Client) -> None:
    """What another request has cached of a session that is about to change is not read again."""
    with pytest.raises(Killed):
        post(shopper, "/read-meanwhile/", new_key())
    assert shopper.session["bought"] == 1


def test_new_session(client: Client) -> None:
    """A session that the view begins is there for the next request."""
    assert post(client, "/begins/", new_key()).status_code == 201
    assert client.session["begun"]


def test_leased(shopper: Client) -> None:
    """In leased mode there is no transaction, and the session is Django's affair."""
    assert post(shopper, "/leased/", new_key()).status_code == 201
    assert shopper.session["bought"] == 1
