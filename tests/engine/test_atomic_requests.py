"""``ATOMIC_REQUESTS``: what ends within a request's transaction, nests in it or waits in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from rest_framework.decorators import api_view
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing import PATIENCE, in_threads
from tests.models import Effect
from tests.support import views
from tests.support.shared import assert_replays, effects, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    in_transaction: ClassVar[list[bool]] = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        Effect.objects.create(reference="initial")

    def post(self, request: Request) -> Response:
        reference = request.data["reference"]
        Effect.objects.create(reference=reference)
        if reference == "error":
            raise LookupError("boom")
        if reference == "invalid":
            raise ValidationError({"reference": ["wrong"]})
        return Response({"reference": reference}, status=503 if reference == "503" else 201)


def create(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    DRF.in_transaction.append(connection.in_atomic_block)
    Effect.objects.create(reference=reference)
    if reference == "error":
        raise LookupError("boom")
    return JsonResponse({"reference": reference}, status=503 if reference == "503" else 201)


def marks(request: HttpRequest) -> HttpResponse:
    """Refuses after it has written, or says that it has succeeded, and marks for rollback."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    transaction.set_rollback(True)
    return JsonResponse({}, status=201 if reference == "success" else 400)


def swallows(request: HttpRequest) -> HttpResponse:
    """Refuses, because of an error of the database that has spoilt its transaction."""
    reference = json.loads(request.body)["reference"]
    effect = Effect.objects.create(reference=reference)
    try:
        Effect(pk=effect.pk, reference=reference).save(force_insert=True)
    except IntegrityError:
        return JsonResponse({}, status=400)
    raise AssertionError


def asks_the_database(error: Exception, context: Any) -> Response | None:
    """A handler of errors that needs the database, as one does that writes in many languages."""
    count = Effect.objects.filter(reference="before").count()
    response = exception_handler(error, context)
    if response is not None:
        response.headers["X-Seen"] = f"{count}"
    return response


@transaction.non_atomic_requests
@idempotent
def non_atomic_decorated(request: HttpRequest) -> HttpResponse:
    return create(request)


def handle(request: Request) -> Response:
    return DRF.post(DRF(), request)


urlpatterns = [
    path("drf/", DRF.as_view()),
    path("marks/", idempotent(marks)),
    path("swallows/", idempotent(swallows)),
    path("non-atomic-decorated/", non_atomic_decorated),
    path("below/", api_view(["POST"])(idempotent(handle))),
]


@pytest.fixture(autouse=True)
def _setup() -> None:
    DRF.in_transaction = []


def ended(sent: list[str]) -> list[str]:
    """The signals that end an attempt, of those that were sent."""
    return [name for name in sent if name in {"completed", "failed", "released"}]


class TestBothWays:
    """What holds with and without ``ATOMIC_REQUESTS``."""

    @pytest.mark.parametrize("url", ["/drf/", "/below/"])
    def test_handled_error(self, client: Client, url: str, atomic: bool) -> None:
        """An error that DRF handles rolls back, wherever the decorator is, and is not stored."""
        key = new_key()
        for attempt in (1, 2):
            assert post(client, url, key, "invalid").status_code == 400
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert effects("invalid") == 0
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects() == 1

    def test_marked_for_rollback(self, client: Client, atomic: bool, sent: list[str]) -> None:
        """A view that refuses and has its transaction rolled back has its response given."""
        key = new_key()
        for attempt in (1, 2):
            assert post(client, "/marks/", key).status_code == 400
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert ended(sent) == ["released", "released"]
        assert effects() == 0

    def test_swallowed_error(self, client: Client, atomic: bool, sent: list[str]) -> None:
        """So has one that refuses because of what the database has refused."""
        assert post(client, "/swallows/", new_key()).status_code == 400
        assert ended(sent) == ["released"]
        assert effects() == 0

    def test_success_that_is_marked_for_rollback(
        self, client: Client, atomic: bool, sent: list[str]
    ) -> None:
        """Nobody is told of a success of which nothing stays."""
        with pytest.raises(transaction.TransactionManagementError):
            post(client, "/marks/", new_key(), "success")
        assert ended(sent) == ["failed"]
        assert effects("success") == 0

    def test_handler_of_errors_asks_the_database(
        self, client: Client, atomic: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """REST framework's may, as without a key: the rollback is not marked before it says so."""
        monkeypatch.setattr(DRF, "get_exception_handler", lambda self: asks_the_database)
        Effect.objects.create(reference="before")
        for key in (None, new_key()):
            done = effects("invalid")
            response = post(client, "/drf/", key, "invalid")
            assert (response.status_code, response["X-Seen"]) == (400, "1")
        assert effects("invalid") == done


class TestAtomicRequests:
    """Django opens and ends the request's transaction; an operation in it is a savepoint."""

    def test_non_atomic_requests(self, client: Client, always_atomic: None) -> None:
        """A view that was taken out stays out; only a claimed handler has its transaction."""
        url, key = "/non-atomic-decorated/", new_key()
        post(client, url)
        first = post(client, url, key)
        assert DRF.in_transaction == [False, True]
        assert_replays(first, post(client, url, key))
        assert post(client, url, new_key(), "503").status_code == 503
        assert effects("503") == 0

    @pytest.mark.parametrize("reference", ["503", "invalid"])
    def test_failed_attempt(self, client: Client, reference: str, always_atomic: None) -> None:
        """With a key only the attempt is rolled back, and not what ``initial()`` wrote."""
        post(client, "/drf/", new_key(), reference)
        assert (effects("initial"), effects(reference)) == (1, 0)

    def test_savepoint(self, client: Client, always_atomic: None) -> None:
        """An operation within the request's transaction is one savepoint."""
        with CaptureQueriesContext(connection) as queries:
            post(client, "/drf/", new_key())
        found = [q["sql"].split()[0] for q in queries if "SAVEPOINT" in q["sql"].upper()]
        assert found == ["SAVEPOINT", "RELEASE"]


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case(client: Client, django_capture_on_commit_callbacks: Any) -> None:
    """In a test that is one transaction the app works; what waits for commit can be captured."""
    key = new_key()
    first = post(client, "/drf/", key)
    assert post(client, "/drf/", new_key(), "503").status_code == 503
    assert effects("503") == 0
    with django_capture_on_commit_callbacks(execute=True):
        assert_replays(first, post(client, "/drf/", key))
    assert record(key).replay_count == 1


# The error of another, nested operation is not the request's own.


def nested(error: str) -> Any:
    """Another operation that ends in an error of ours."""

    def fn(_: Any) -> Any:
        raise {"busy": OperationInProgress, "gone": StoreUnavailable}[error]

    if error in ("busy", "gone"):
        return idempotent_call(fn, key="nested", scope="nested")
    idempotent_call(lambda _: None, key="other", scope="nested", fingerprint=1)
    return idempotent_call(lambda _: None, key="other", scope="nested", fingerprint=2)


def nesting(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    nested(reference)
    return JsonResponse({}, status=201)


urlpatterns += [
    path("nesting/", idempotent(nesting)),
    path("nesting-leased/", idempotent(mode="leased")(nesting)),
]


@pytest.mark.parametrize("url", ["/nesting/", "/nesting-leased/"])
@pytest.mark.parametrize(
    ("reference", "error"),
    [("busy", OperationInProgress), ("gone", StoreUnavailable), ("other", FingerprintMismatch)],
)
def test_error_of_a_nested_operation(
    client: Client, url: str, reference: str, error: type[IdempotencyError], atomic: bool
) -> None:
    """A nested operation's error is the view's: Django's 500, and no problem of the request."""
    if atomic and url == "/nesting-leased/":
        pytest.skip("NO LEASED VIEWS UNDER ATOMIC_REQUESTS")
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(error):
            post(client, url, key, reference)
        if atomic:  # the record of the attempt has gone with the request's transaction
            assert not IdempotencyKey.objects.filter(key=key).exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert effects(reference) == 0 or url == "/nesting-leased/"


def test_error_of_a_call_within_a_call() -> None:
    """An outer call raises what its function raised, and does not take it for its own."""
    with pytest.raises(OperationInProgress) as caught:
        idempotent_call(lambda _: nested("busy"), key="outer", scope="nested")
    assert caught.value.foreign
    assert record("outer").status == "failed"


# A duplicate that waits.


class Waits(IdempotentViewMixin, APIView):
    """A second request reads something before it waits for the first."""

    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(on_conflict=timedelta(seconds=20))
    claimed: ClassVar[threading.Event]
    looked: ClassVar[threading.Event]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if "X-Second" in request.headers:
            assert self.claimed.wait(PATIENCE)
            assert not Effect.objects.exists()
            self.looked.set()

    def post(self, request: Request) -> Response:
        self.claimed.set()
        assert self.looked.wait(PATIENCE)
        Effect.objects.create(reference=request.data["reference"])
        return Response({}, status=201)


urlpatterns += [path("waits/", Waits.as_view())]


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLITE HAS ONE WRITE LOCK FOR ALL")
def test_waiter_replays(always_atomic: None) -> None:
    """The waiter looks again and again in its own transaction, and gets the first's response."""
    Waits.claimed, Waits.looked = threading.Event(), threading.Event()
    key = new_key()
    first, second = in_threads(
        [
            lambda: post(Client(), "/waits/", key),
            lambda: post(Client(), "/waits/", key, headers={"X-Second": "1"}),
        ]
    )
    assert_replays(first, second)
    assert effects() == 1


# What a receiver of a signal meets in the database spoils nobody's transaction.


urlpatterns += [
    path("created/", idempotent(views.create)),
    path("created-leased/", idempotent(mode="leased")(views.create)),
]


def fails(**_: Any) -> None:
    """A receiver whose statement is refused."""
    effect = Effect.objects.create(reference="receiver")
    Effect(pk=effect.pk).save(force_insert=True)


def marks(**_: Any) -> None:
    """One that marks the transaction for rollback, or is in none."""
    try:
        with transaction.atomic(savepoint=False):
            fails()
    except IntegrityError:
        pass


@pytest.fixture(params=[fails, marks])
def _receivers(request: pytest.FixtureRequest) -> Iterator[None]:
    """A receiver of every signal that spoils what it is called in."""
    every = [each for each in vars(signals).values() if isinstance(each, signals.Signal)]
    for signal in every:
        signal.connect(request.param)
    yield
    for signal in every:
        signal.disconnect(request.param)


@pytest.mark.usefixtures("_receivers", "atomic")
@pytest.mark.parametrize("url", ["/created/", "/created-leased/"])
class TestReceiver:
    """One that fails, in whichever way."""

    @pytest.fixture(autouse=True)
    def _skip_what_is_refused(self, url: str, atomic: bool) -> None:
        if atomic and url == "/created-leased/":
            pytest.skip("LEASED MODE NEEDS AUTOCOMMIT")

    def test_executed_and_replayed(self, client: Client, url: str) -> None:
        """``claimed``, ``completed`` and ``replayed``: one effect, and its response again."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects() == 1

    def test_failed(self, client: Client, url: str) -> None:
        """``failed``: the response is given and the key is free."""
        key = new_key()
        for _ in range(2):
            assert post(client, url, key, "503").status_code == 503
        assert record(key).status == "failed"


def test_receiver_of_claimed_writes(client: Client, atomic: bool) -> None:
    """What a receiver of ``claimed`` writes is committed with the operation, and only with it."""

    def audit(**_: Any) -> None:
        Effect.objects.create(reference="audit")

    signals.claimed.connect(audit)
    try:
        post(client, "/created/", new_key(), "503")
        assert effects("audit") == 0
        post(client, "/created/", new_key())
        assert effects("audit") == 1
    finally:
        signals.claimed.disconnect(audit)
