"""``ATOMIC_REQUESTS``, ``non_atomic_requests`` and other transactions around a view."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from django.conf import settings as django_settings
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.decorators import api_view
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


def seen_in_transaction() -> bool:
    return bool(connection.in_atomic_block)


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    in_transaction: ClassVar[list[tuple[str, bool]]] = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        Effect.objects.create(reference="initial")
        DRF.in_transaction.append(("initial", seen_in_transaction()))

    def post(self, request: Request) -> Response:
        reference = request.data["reference"]
        DRF.in_transaction.append(("handler", seen_in_transaction()))
        Effect.objects.create(reference=reference)
        if reference == "error":
            raise LookupError("boom")
        if reference == "invalid":
            raise ValidationError({"reference": ["wrong"]})
        return Response({"reference": reference}, status=503 if reference == "503" else 201)


class _FailsBehind:
    """What a base of the view does with the response, behind the operation."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        response = super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        if json.loads(request.body)["reference"] == "mark":
            transaction.set_rollback(True)
            return response
        raise InterruptedError


class FailsBehind(IdempotentViewMixin, _FailsBehind, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference=request.data["reference"])
        return Response({}, status=201)


@method_decorator(transaction.non_atomic_requests, name="dispatch")
class NonAtomic(DRF):
    pass


def create(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    DRF.in_transaction.append(("handler", seen_in_transaction()))
    Effect.objects.create(reference=reference)
    if reference == "error":
        raise LookupError("boom")
    return JsonResponse({"reference": reference}, status=503 if reference == "503" else 201)


decorated = idempotent(create)


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


def plain(request: HttpRequest) -> HttpResponse:
    return create(request)


@transaction.non_atomic_requests
def non_atomic_plain(request: HttpRequest) -> HttpResponse:
    return create(request)


def handle(request: Request) -> Response:
    return DRF.post(DRF(), request)


class Bare(APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        return handle(request)


urlpatterns = [
    path("drf/", DRF.as_view()),
    path("fails-behind/", FailsBehind.as_view()),
    path("marks/", idempotent(marks)),
    path("swallows/", idempotent(swallows)),
    path("non-atomic/", NonAtomic.as_view()),
    path("decorated/", decorated),
    path("non-atomic-decorated/", non_atomic_decorated),
    path("middleware/", plain),
    path("non-atomic-middleware/", non_atomic_plain),
    path("below/", api_view(["POST"])(idempotent(handle))),
    path("drf-middleware/", Bare.as_view()),
]

HANDLED = ["/drf/", "/below/", "/drf-middleware/"]


@pytest.fixture(autouse=True)
def _setup(settings: Any) -> None:
    settings.MIDDLEWARE = [
        *django_settings.MIDDLEWARE,
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]
    DRF.in_transaction = []


def ended(sent: list[str]) -> list[str]:
    """The signals that end an attempt, of those that were sent."""
    return [name for name in sent if name in {"completed", "failed", "released"}]


class TestBothWays:
    """What holds with and without ``ATOMIC_REQUESTS``."""

    @pytest.mark.parametrize("url", HANDLED)
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

    @pytest.mark.parametrize(
        "url",
        [
            "/non-atomic/",
            "/non-atomic-decorated/",
            "/non-atomic-middleware/",
        ],
    )
    def test_non_atomic_requests(self, client: Client, url: str, always_atomic: None) -> None:
        """A view that was taken out stays out; only a claimed handler has its transaction."""
        post(client, url)
        assert {inside for _, inside in DRF.in_transaction} == {False}
        DRF.in_transaction = []
        key = new_key()
        first = post(client, url, key)
        assert dict(DRF.in_transaction)["handler"] is True
        assert dict(DRF.in_transaction).get("initial", False) is False
        assert_replays(first, post(client, url, key))
        assert post(client, url, new_key(), "503").status_code == 503
        assert effects("503") == 0

    @pytest.mark.parametrize("reference", ["503", "invalid"])
    def test_failed_attempt(self, client: Client, reference: str, always_atomic: None) -> None:
        """With a key only the attempt is rolled back, and not what ``initial()`` wrote."""
        post(client, "/drf/", new_key(), reference)
        assert (effects("initial"), effects(reference)) == (1, 0)

    def test_error_behind_the_operation(
        self, client: Client, always_atomic: None, sent: list[str]
    ) -> None:
        """What fails behind the operation takes its effects and its response; a retry runs."""
        key = new_key()
        with pytest.raises(InterruptedError):
            post(client, "/fails-behind/", key)
        assert not IdempotencyKey.objects.exists()
        assert ended(sent) == []
        assert effects() == 0

    def test_rollback_behind_the_operation(
        self, client: Client, always_atomic: None, sent: list[str]
    ) -> None:
        """So does what is rolled back there without an error, as in Django."""
        key = new_key()
        assert post(client, "/fails-behind/", key, "mark").status_code == 201
        assert not IdempotencyKey.objects.exists()
        assert ended(sent) == []
        assert effects("mark") == 0

    def test_savepoint(self, client: Client, always_atomic: None) -> None:
        """An operation within the request's transaction is one savepoint."""
        with CaptureQueriesContext(connection) as queries:
            post(client, "/drf/", new_key())
        found = [q["sql"].split()[0] for q in queries if "SAVEPOINT" in q["sql"].upper()]
        assert found == ["SAVEPOINT", "RELEASE"]


@pytest.mark.django_db(transaction=False)
def test_end_inside_a_test_case(client: Client, always_atomic: None, sent: list[str]) -> None:
    """In a test that is one transaction no commit is seen, which makes no failure of a success."""
    key = new_key()
    assert post(client, "/drf/", key).status_code == 201
    assert record(key).status == "completed"
    assert ended(sent) == []
    with pytest.raises(InterruptedError):
        post(client, "/fails-behind/", new_key())
    post(client, "/fails-behind/", new_key(), "mark")
    assert ended(sent) == []
    assert (effects(), effects("mark")) == (1, 0)


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
