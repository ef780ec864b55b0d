"""What every adapter promises: views of Django, REST framework and django-ninja.

What is a promise of one of them alone is in ``test_drf.py``, ``test_ninja.py`` and so on; who else
gets no replay is in ``test_unprotected.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.test import Client
from django.urls import path

from idempotency_django.http import IdempotencyStatusView
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, keys, scopes, store_errors, store_only
from idempotency_django.stores.records import Record
from idempotency_django.testing import in_threads
from tests.contract.adapters import ADAPTERS, Adapter, Gate, Result, Served, Work, make
from tests.models import Effect
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)
from tests.support.ways import MIDDLEWARE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=ADAPTERS)
def adapter(request: Any) -> Adapter:
    """The adapters, one after the other."""
    return ADAPTERS[request.param]


transactional = pytest.mark.parametrize(
    "adapter", [pytest.param(each, id=name) for name, each in ADAPTERS.items() if not each.is_async]
)


@pytest.fixture(autouse=True)
def _gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "is_open", True)
    monkeypatch.setattr(Gate, "asked", 0)


Send = Callable[..., Any]
Serve = Callable[..., Send]


@pytest.fixture
def serve(adapter: Adapter, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve a piece of work with a policy; what sends requests to it."""

    def serve(work: Work = make, **policy: Any) -> Send:
        monkeypatch.setattr(Served, "work", [work])
        view = adapter.serve(Policy(**policy))
        settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("job/", view)]})

        def send(
            key: str | None = None,
            reference: str = "a",
            client: Client | None = None,
            **options: Any,
        ) -> Any:
            sender = client or Client(raise_request_exception=False)
            return post(sender, "/job/", key, reference, **options)

        return send

    return serve


def assert_executed(response: Any) -> None:
    """The work was done now."""
    assert response.status_code < 400, response.content
    assert not is_replay(response)


def is_page(response: Any) -> bool:
    """Whether it is a page of HTML, which is not stored."""
    return bool(response.content) and response["Content-Type"].startswith("text/html")


class TestReplay:
    """A retry gets the first response."""

    def test_once(self, adapter: Adapter, serve: Serve) -> None:
        """The work is done once; each retry gets the first response, and is counted."""
        send, key = serve(), new_key()
        first = send(key)
        assert_executed(first)
        for _ in range(2):
            assert_replays(first, send(key))
        assert effects() == 1
        row = record(key)
        assert (row.status, row.attempt, row.replay_count) == ("completed", 1, 2)

    @pytest.mark.parametrize(
        "response",
        [
            Result(headers={"Location": "/effects/1", "X-Number": "7"}),
            Result(404),
            Result(400),
            HttpResponse(status=204),
            HttpResponse(
                bytes(range(256)),
                headers={"Content-Encoding": "x-own", "Link": "<a>, <b>"},
                content_type="application/x-own",
            ),
        ],
        ids=["headers", "404", "400", "empty", "binary"],
    )
    def test_fidelity(self, adapter: Adapter, serve: Serve, response: Any) -> None:
        """Status, headers and body of any kind are replayed exactly, also those of a 4xx."""

        def work(request: Any, reference: str) -> Any:
            make(request, reference)
            return response

        send, key = serve(work), new_key()
        first = send(key)
        assert first.status_code == (
            response.status if isinstance(response, Result) else response.status_code
        )
        assert dict(getattr(response, "headers", {})).items() <= dict(first.headers).items()
        assert_replays(first, send(key))
        assert effects() == 1

    def test_unkept_headers(self, adapter: Adapter, serve: Serve) -> None:
        """Cookies and request ids belong to the first response alone."""

        def work(request: Any, reference: str) -> HttpResponse:
            response = HttpResponse(headers={"X-Request-Id": "1"})
            response.set_cookie("session", "secret")
            return response

        send, key = serve(work), new_key()
        assert send(key).cookies["session"].value == "secret"
        again = send(key)
        assert is_replay(again)
        assert not again.cookies
        assert "X-Request-Id" not in again
        assert "secret" not in record(key).response_headers

    def test_no_key(self, adapter: Adapter, serve: Serve) -> None:
        """Without a key, where none is required, each request does the work."""
        seen: list[Any] = []

        def work(request: Any, reference: str) -> Result:
            seen.append(request.idempotency)
            return make(request, reference)

        send = serve(work)
        for _ in range(2):
            assert_executed(send())
        assert effects() == 2
        assert seen == [None, None]
        assert not IdempotencyKey.objects.exists()

    def test_other_methods(self, adapter: Adapter, serve: Serve, settings: Any) -> None:
        """PUT takes part; a method that is not served is refused as ever, middleware or not."""
        send, key = serve(), new_key()
        assert_replays(send(key, method="put"), send(key, method="put"))
        assert effects() == 1
        for middleware in (settings.MIDDLEWARE, MIDDLEWARE):
            settings.MIDDLEWARE = middleware
            assert send(new_key(), method="patch").status_code == 405

    def test_natural_key(self, adapter: Adapter, serve: Serve) -> None:
        """The key may be a field of what is asked for."""
        send = serve(key=keys.instead_of_header(keys.natural("reference")), required=True)
        reference = new_key()
        assert_replays(send(new_key(), reference), send(new_key(), reference))
        assert effects(reference) == 1
        problem = assert_problem(send(new_key(), ""), 400, "key-missing")
        assert "fields" in problem["detail"]

    def test_generated_key(self, adapter: Adapter, serve: Serve) -> None:
        """A client that sends no key is told the one made for it, and can retry with it."""
        send = serve(key=keys.generated)
        first = send()
        again = send(first["Idempotency-Key"].strip('"'))
        assert is_replay(again)
        assert again.content == first.content

    def test_status_header(self, adapter: Adapter, serve: Serve) -> None:
        """``Idempotency-Status`` says what became of each request with a key."""
        send, key = serve(), new_key()
        said = [send(key), send(key), send(key, "b"), send()]
        words = [each.get("Idempotency-Status", "").split(";")[0] for each in said]
        assert words == ["executed", "replayed", "mismatch", ""]

    def test_altered_replay(self, adapter: Adapter, serve: Serve) -> None:
        """``on_replay`` alters replays, not what is stored."""

        def refreshed(request: Any, response: HttpResponse) -> HttpResponse:
            response.status_code = 200
            response["X-Effects"] = str(Effect.objects.count())
            response.content += request.path.encode()
            return response

        send, key = serve(on_replay=refreshed), new_key()
        first = send(key)
        stored = record(key).response_body
        assert (first.status_code, "X-Effects" in first) == (201, False)
        for _ in range(2):
            again = send(key)
            assert is_replay(again)
            assert (again.status_code, again.reason_phrase) == (200, "OK")
            assert again["X-Effects"] == "1"
            assert again.content == first.content + b"/job/"
        assert record(key).response_body == stored
        assert effects() == 1

    def test_rebuilt(self, adapter: Adapter, serve: Serve) -> None:
        """The policy may rebuild a response that is not stored."""

        def rebuild(record: Record, request: Any) -> HttpResponse:
            return HttpResponse(request.path, "text/plain")

        send, key = serve(max_response_bytes=0, rebuild=rebuild), new_key()
        assert send(key)["Idempotency-Status"].startswith("executed; ttl=")
        again = send(key)
        assert (again.content, is_replay(again)) == (b"/job/", True)
        assert effects() == 1


class TestRefusal:
    """What is refused, and that nothing is done."""

    def test_mismatch(self, adapter: Adapter, serve: Serve) -> None:
        """The key of another request: 422."""
        send, key = serve(), new_key()
        send(key)
        assert_problem(send(key, "b"), 422, "mismatch")
        assert effects("b") == 0

    def test_missing(self, adapter: Adapter, serve: Serve) -> None:
        """A required key is missing: 400."""
        send = serve(required=True)
        problem = assert_problem(send(), 400, "key-missing")
        assert "Idempotency-Key" in problem["detail"]
        assert effects() == 0

    @pytest.mark.parametrize(
        ("key", "reason"), [('"open', "not one quoted string"), ("order-1", "unguessable")]
    )
    def test_unusable_key(self, adapter: Adapter, serve: Serve, key: str, reason: str) -> None:
        """A malformed key, and an anonymous caller's that could be guessed: 400."""
        send = serve()
        response = send(headers={"Idempotency-Key": key})
        assert reason in assert_problem(response, 400, "key-malformed")["detail"]
        assert effects() == 0

    @pytest.mark.parametrize("mode", ["auto", "leased"])
    def test_in_progress(self, adapter: Adapter, serve: Serve, mode: str) -> None:
        """A duplicate while the work is being done: 409, and the work is done once."""
        if connection.vendor == "sqlite" and mode == "auto" and not adapter.is_async:
            pytest.skip("SQLite makes it wait")
        key = new_key()
        during: list[Any] = []

        def work(request: Any, reference: str) -> Result:
            during.extend(in_threads([lambda: send(key)]))
            return make(request, reference)

        send = serve(work, mode=mode)
        first = send(key)
        assert_executed(first)
        assert_problem(during[0], 409, "in-progress")
        assert during[0]["Retry-After"] == "1"
        assert_replays(first, send(key))
        assert effects() == 1

    def test_accepted(self, adapter: Adapter, serve: Serve, settings: Any) -> None:
        """With ``on_conflict="accepted"``, it is told where to look for the response: 202."""
        key = new_key()
        during: list[Any] = []

        def work(request: Any, reference: str) -> Result:
            during.extend(in_threads([lambda: send(key)]))
            return make(request, reference)

        send = serve(work, mode="leased", on_conflict="accepted")
        status = path(
            "status/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status"
        )
        settings.ROOT_URLCONF.urlpatterns.append(status)
        first = send(key)
        assert during[0].status_code == 202
        assert during[0]["Idempotency-Status"] == "in-progress"
        assert Client().get(during[0]["Location"]).json()["status"] == "completed"
        assert_replays(first, send(key))
        assert effects() == 1

    def test_store_that_is_away(self, adapter: Adapter, serve: Serve, settings: Any) -> None:
        """While the store cannot be reached: 503, and nothing is done."""
        away = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
        settings.CACHES = {"default": away}
        backend = "idempotency_django.contrib.redis.RedisStore"
        settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": backend}}}
        refused = serve()(new_key())
        assert_problem(refused, 503, "store-unavailable")
        assert refused["Retry-After"] == "1"
        assert effects() == 0

    def test_checks(self, adapter: Adapter, serve: Serve) -> None:
        """Throttles and permissions are asked once for each request, before a replay."""
        send, key = serve(), new_key()
        first = send(key)
        assert Gate.asked == 1
        assert_replays(first, send(key))
        assert Gate.asked == 2
        Gate.is_open = False
        closed = send(key)
        assert Gate.asked == 3
        assert (closed.status_code, is_replay(closed)) == (adapter.closed, False)
        Gate.is_open = True
        assert_replays(first, send(key))

    def test_check_replay(self, adapter: Adapter, serve: Serve, sent: list[str]) -> None:
        """The policy's ``check_replay`` refuses a replay, and leaves the record as it is."""
        refuses: list[bool] = []

        def check(request: Any, record: Record) -> None:
            if refuses:
                raise PermissionDenied

        send, key = serve(check_replay=check), new_key()
        first = send(key)
        assert_replays(first, send(key))
        refuses.append(True)
        refused = send(key)
        assert refused.status_code >= 400
        assert not is_replay(refused)
        assert sent.count("replayed") == 1
        refuses.clear()
        assert_replays(first, send(key))
        assert effects() == 1

    def test_shared_scope(self, adapter: Adapter, serve: Serve) -> None:
        """In a scope that users share, a key is only its first user's, in any session."""
        alice, again, bob = Client(), Client(), Client()
        user = User.objects.create_user("alice")
        alice.force_login(user)
        again.force_login(user)
        bob.force_login(User.objects.create_user("bob"))
        send, key = serve(scope=scopes.shared), new_key()
        first = send(key, client=alice)
        assert record(key).principal == f"user:{user.pk}"
        assert_problem(send(key, client=bob), 422, "mismatch")
        assert_problem(send(key), 422, "mismatch")
        assert_replays(first, send(key, client=again))
        assert effects() == 1

    def test_too_large(self, adapter: Adapter, serve: Serve) -> None:
        """A response that is too large is given once; a retry is told so, and does nothing."""
        send, key = serve(max_response_bytes=1), new_key()
        assert_executed(send(key))
        assert_problem(send(key), 409, "response-not-stored")
        assert effects() == 1
        assert record(key).response_body is None

    def test_stream(self, adapter: Adapter, serve: Serve) -> None:
        """So is a stream."""

        def work(request: Any, reference: str) -> StreamingHttpResponse:
            make(request, reference)
            return StreamingHttpResponse([b"a", b"b"])

        send, key = serve(work), new_key()
        assert send(key).getvalue() == b"ab"
        assert_problem(send(key), 409, "response-not-stored")
        assert effects() == 1


class TestFailure:
    """What is rolled back, and what is kept of it. Nothing spans async work to be rolled back."""

    @pytest.mark.parametrize("error", [Http404("no such thing"), LookupError("boom")])
    def test_raised(self, adapter: Adapter, serve: Serve, error: Exception) -> None:
        """A raised error rolls back and is not stored: a retry does the work."""
        fails = [True, True]

        def work(request: Any, reference: str) -> Result:
            made = make(request, reference)
            if fails:
                raise error
            return made

        send, key = serve(work), new_key()
        for attempt in (1, 2):
            failed = send(key)
            assert failed.status_code >= 400
            assert effects() == (attempt if adapter.is_async else 0)
            row = record(key)
            assert (row.status, row.attempt) == ("failed", attempt)
            assert row.error == f"{type(error).__name__}: {error}"
        fails.clear()
        first = send(key)
        assert_executed(first)
        assert_replays(first, send(key))

    def test_unkept_statuses(self, adapter: Adapter, serve: Serve) -> None:
        """A returned 5xx, and responses about the moment, roll back; a retry does the work."""

        def work(request: Any, reference: str) -> Result:
            make(request, reference)
            return Result(int(reference))

        send = serve(work)
        for status in (500, 503, 401, 403, 408, 409, 412, 423, 425, 428, 429):
            key, reference = new_key(), str(status)
            for attempt in (1, 2):
                response = send(key, reference)
                assert response.status_code == status
                assert not is_replay(response)
                row = record(key)
                assert (row.status, row.attempt) == ("failed", attempt)
            assert effects(reference) == (2 if adapter.is_async else 0)

    def test_should_store(self, adapter: Adapter, serve: Serve) -> None:
        """What ``should_store`` rejects is rolled back, and frees the key."""
        stores: list[bool] = []
        send, key = serve(should_store=lambda request, response: bool(stores)), new_key()
        for attempt in (1, 2):
            assert_executed(send(key))
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert effects() == (2 if adapter.is_async else 0)
        stores.append(True)
        first = send(key)
        assert_replays(first, send(key))

    @pytest.mark.parametrize(
        ("status", "is_stored", "kept"),
        [(201, True, 1), (409, True, 1), (404, True, 0), (200, False, 0), (422, False, 0)],
    )
    def test_store_only(
        self, adapter: Adapter, serve: Serve, status: int, is_stored: bool, kept: int
    ) -> None:
        """``store_only()`` stores the statuses of its list, raised ones too, and no others."""

        def work(request: Any, reference: str) -> Result:
            make(request, reference)
            if status == 404:
                raise Http404
            return Result(status)

        send, key = serve(work, should_store=store_only(201, 409, 404)), new_key()
        first, again = send(key), send(key)
        assert first.status_code == status
        if is_page(first):
            assert_problem(again, 409, "response-not-stored")
        else:
            assert (again.status_code, is_replay(again)) == (status, is_stored)
        assert effects() == ((1 if is_stored else 2) if adapter.is_async else kept)

    def test_store_errors(self, adapter: Adapter, serve: Serve) -> None:
        """``store_errors`` stores a raised 4xx after the rollback."""

        def work(request: Any, reference: str) -> Result:
            make(request, reference)
            raise Http404

        send, key = serve(work, should_store=store_errors), new_key()
        first, again = send(key), send(key)
        assert first.status_code == 404
        if is_page(first):
            assert_problem(again, 409, "response-not-stored")
        else:
            assert_replays(first, again)
        assert record(key).attempt == 1
        assert effects() == (1 if adapter.is_async else 0)

    def test_lost_claim(
        self, adapter: Adapter, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If the record vanishes meanwhile: 500, rolled back, and the log says why."""

        fails = [LookupError]  # the first attempt, which leaves a record

        def work(request: Any, reference: str) -> Result:
            if fails:
                raise fails.pop()
            IdempotencyKey.objects.all().delete()
            return make(request, reference)

        send, key = serve(work), new_key()
        assert send(key).status_code >= 400
        assert_problem(send(key), 500, "claim-lost")
        assert "ClaimLost" in caplog.text
        assert effects() == (1 if adapter.is_async else 0)

    @transactional
    def test_commit_hooks(self, adapter: Adapter, serve: Serve) -> None:
        """``on_commit`` hooks run once, with the effect, and not for a failure or a replay."""
        ran: list[str] = []

        def work(request: Any, reference: str) -> Result:
            transaction.on_commit(lambda: ran.append(reference))
            if reference == "fails":
                raise LookupError
            return make(request, reference)

        send, key = serve(work), new_key()
        send(new_key(), "fails")
        assert ran == []
        send(key)
        send(key)
        assert ran == ["a"]

    def test_steps(self, adapter: Adapter, serve: Serve) -> None:
        """A later attempt of leased work does not repeat the steps of the first."""
        charged: list[int] = []

        def work(request: Any, reference: str) -> Result:
            execution = request.idempotency
            execution.step("charge", lambda: charged.append(execution.attempt))
            if execution.attempt == 1:
                raise LookupError
            with execution.atomic():
                return make(request, reference)

        send, key = serve(work, mode="leased"), new_key()
        assert send(key).status_code >= 400
        first = send(key)
        assert_executed(first)
        assert_replays(first, send(key))
        assert (charged, effects()) == ([1], 1)


@pytest.mark.usefixtures("always_atomic")
@transactional
def test_atomic_requests(adapter: Adapter, serve: Serve) -> None:
    """The effect and its response commit together; a raised error takes back both."""
    fails = [True]

    def work(request: Any, reference: str) -> Result:
        made = make(request, reference)
        if fails:
            raise Http404
        return made

    send, key = serve(work), new_key()
    assert send(key).status_code >= 400
    assert effects() == 0
    # Where the error ends the request's transaction, the record of the attempt has gone too.
    attempts = IdempotencyKey.objects.filter(key=key).values_list("status", "attempt")
    assert {*attempts} <= {("failed", 1)}
    fails.clear()
    first = send(key)
    assert_executed(first)
    assert_replays(first, send(key))
    assert effects() == 1
