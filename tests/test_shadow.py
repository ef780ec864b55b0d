"""The shadow mode: nothing is enforced, and what would have been is counted."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
    UnreadablePostError,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory, TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.http import require_POST
from django.views.generic import View
from drf_spectacular.generators import SchemaGenerator
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import Policy, idempotent
from idempotency_django.checks.inventory import endpoints
from idempotency_django.contrib.redis import RedisStore
from idempotency_django.drf import IdempotentViewMixin, idempotent_items
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import StoreUnavailable
from idempotency_django.http import bodies, shadow
from idempotency_django.models import IdempotencyKey, IdempotencyObservation
from idempotency_django.policy import keys, scopes
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import in_threads
from tests import ways
from tests.models import Effect
from tests.servers import Server
from tests.support import LONG_AGO, effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

OBSERVE = {"POLICY": {"mode": "observe"}}
MIDDLEWARE = ways.MIDDLEWARE
REDIS = "idempotency_django.contrib.redis.RedisStore"

paused: dict[str, Callable[[], object]] = {}
"""What a view waits for, by its reference."""


def create(request: Any) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    paused.get(reference, bool)()
    if reference == "boom":
        raise LookupError(reference)
    if reference == "gone":
        raise Http404
    status = int(reference) if reference.isdigit() else 201
    return JsonResponse({"id": effects(reference)} if reference == "new" else {}, status=status)


async def acreate(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    await Effect.objects.acreate(reference=reference)
    if reference == "boom":
        raise LookupError(reference)
    return JsonResponse({}, status=201)


async def ahanging(request: HttpRequest) -> HttpResponse:
    await Effect.objects.acreate(reference="a")
    paused["begun"]()
    await asyncio.Event().wait()
    raise AssertionError


def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse([request.read()[:3], b"done"])


def page(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return TemplateResponse(request, engines["django"].from_string("n={{ n }}"), {"n": 1})


def who(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.user.get_username())


def chunks(request: HttpRequest) -> HttpResponse:
    read = request.META["wsgi.input"].read
    return HttpResponse([read(3), read(5), read()])


def lines(request: HttpRequest) -> HttpResponse:
    source = request.META["wsgi.input"]
    return HttpResponse(b"|".join([source.readline(), source.readline(4), *source]))


def never(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return HttpResponse("done")


def read(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.read())


def exporting(request: HttpRequest) -> HttpResponse:
    for name in "ab":
        Path(request.GET["folder"], f"alice-{name}").touch()
    return HttpResponse("done")


def starting(request: HttpRequest) -> HttpResponse:
    subprocess.run([b"/nowhere/\xff\b"], check=False)
    raise AssertionError


def looping(request: HttpRequest) -> HttpResponse:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for port in range(20_000, 20_300):
            sender.sendto(b"", ("127.0.0.1", port))
    return HttpResponse("done")


def giving_up(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    transaction.set_rollback(True)
    return HttpResponse("done")


def page_giving_up(request: HttpRequest) -> HttpResponse:
    response = page(request)
    transaction.set_rollback(True)
    return response


def outage(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    transaction.on_commit(connection.connection.close)
    return HttpResponse("done", status=201)


def mailing(request: HttpRequest) -> HttpResponse:
    subprocess.run(["true"], check=True)
    return HttpResponse("done")


def later(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        transaction.on_commit(lambda: subprocess.run(["true"], check=True))
    return HttpResponse("done")


def stepping(request: Any) -> HttpResponse:
    """What a leased view does."""
    execution = request.idempotency
    with execution.atomic():
        effect = Effect.objects.create(reference="a")
    execution.resource = effect
    number = execution.step("count", Effect.objects.count)
    return JsonResponse({"attempt": execution.attempt, "n": number}, status=201)


async def astepping(request: Any) -> HttpResponse:
    await Effect.objects.acreate(reference="a")
    number = await request.idempotency.astep("count", Effect.objects.count)
    return JsonResponse({"n": number}, status=201)


def deriving(request: Any) -> HttpResponse:
    return HttpResponse(str(request.idempotency and request.idempotency.derive_key("charge")))


class Outer(View):
    """A view with a part that is enforced, which nothing outside can see."""

    def post(self, request: HttpRequest) -> HttpResponse:
        return idempotent(mode="auto")(create)(request)


def parts(request: Any) -> HttpResponse:
    """Calls two enforced views and an observed one, and goes on with its own steps."""
    responses = [
        idempotent(mode="auto", scope=lambda _: "one")(create)(request),
        idempotent(mode="auto", scope=lambda _: "two")(create)(request),
        observe(create)(request),
    ]
    if request.idempotency:
        request.idempotency.step("count", Effect.objects.count)
    return JsonResponse({"replays": [is_replay(each) for each in responses]}, status=201)


async def aparts(request: Any) -> HttpResponse:
    await observe(acreate)(request)
    await request.idempotency.astep("count", Effect.objects.count)
    return await observe(acreate)(request)  # type: ignore[no-any-return]


def surrounding(request: HttpRequest) -> HttpResponse:
    """An enforced view with an observed part."""
    return observe(create)(request)  # type: ignore[no-any-return]


class SteppingDRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(required=True, mode="observe")

    def post(self, request: Request) -> Response:
        self.request.idempotency.resource = Effect.objects.create(reference="a")
        return Response({}, status=201)


class Items(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(mode="observe")

    def post(self, request: Request) -> Response:
        return Response(idempotent_items(self, self.create), status=207)

    def create(self, request: Request) -> Response:
        return Response({"id": Effect.objects.create(reference="a").pk}, status=201)


class Django(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


class Inner(View):
    @method_decorator(idempotent(mode="observe"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


class Enforced(IdempotentViewMixin, APIView):
    def post(self, request: Request) -> Response:
        raise NotImplementedError


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(mode="observe")

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference=request.data["reference"])
        if request.data["reference"] == "invalid":
            raise ValidationError
        return Response({}, status=201)


observe = idempotent(mode="observe")
urlpatterns = [
    *ways.urlpatterns,
    path("view/", observe(create)),
    path("required/", idempotent(mode="observe", required=True)(create)),
    path("dialect/", idempotent(mode="observe", dialect="square")(never)),
    path("shared/", idempotent(mode="observe", scope=scopes.shared)(create)),
    path("natural/", idempotent(mode="observe", key=keys.natural("reference"))(create)),
    path("class/", observe(Django).as_view()),
    path("inner/", Inner.as_view()),
    path("drf/", DRF.as_view()),
    path("enforced/", Enforced.as_view()),
    path("mailing/", require_POST(observe(mailing))),
    path("later/", observe(later)),
    path("async/", observe(acreate)),
    path("stream/", observe(stream)),
    path("page/", observe(page)),
    path("plain-page/", page),
    path("plain/", create),
    path("plain-who/", who),
    path("chunks/", observe(chunks)),
    path("lines/", observe(lines)),
    path("read/", observe(read)),
    path("plain-read/", read),
    path("enforced-create/", idempotent(never)),
    path("starting/", observe(starting)),
    path("looping/", observe(looping)),
    path("giving-up/", observe(giving_up)),
    path("page-giving-up/", observe(page_giving_up)),
    path("exporting/", observe(exporting)),
    path("outage/", observe(outage)),
    path("stepping/", idempotent(mode="observe", required=True)(stepping)),
    path("astepping/", idempotent(mode="observe", required=True)(astepping)),
    path("stepping-drf/", SteppingDRF.as_view()),
    path("deriving/", observe(deriving)),
    path("outer/", observe(Outer).as_view()),
    path("parts/", observe(parts)),
    path("aparts/", observe(aparts)),
    path("surrounding/", idempotent(mode="auto")(surrounding)),
    path("drf-around/", observe(DRF.as_view())),
    path("items/", Items.as_view()),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    shadow._failures.clear()
    paused.clear()
    yield
    paused.clear()


def counts(endpoint: str = "", *, zeros: bool = False) -> dict[str, int]:
    """What was counted at an endpoint, or at the only one."""
    rows = IdempotencyObservation.objects.order_by("pk")
    rows = rows.filter(endpoint=endpoint) if endpoint else rows
    assert len({row.endpoint for row in rows}) <= 1
    return {row.what: row.count for row in rows if row.count or zeros}


WAYS = [pytest.param(way, id=way.name) for way in ways.WAYS]


class TestEveryWay:
    @pytest.mark.parametrize("way", WAYS)
    def test_nothing_is_enforced(self, way: ways.Way, alice: Client, settings: Any) -> None:
        """Whatever protects a view, a duplicate is executed again, unmarked, and counted."""
        settings.MIDDLEWARE = MIDDLEWARE
        settings.IDEMPOTENCY = OBSERVE
        key = new_key()
        first, second = (post(alice, way.path, key) for _ in range(2))
        assert (first.status_code, second.status_code) == (201, 201)
        assert second.content == first.content
        assert not is_replay(second)
        assert effects() == 2
        assert counts() == {"executed": 1, "replayed": 1}
        assert counts(f"POST {way.path}")

    @pytest.mark.parametrize(
        "refusal",
        [pytest.param(each, id=each.name) for each in ways.REFUSED if each.by == "middleware"],
    )
    def test_what_cannot_be_protected(
        self, refusal: ways.Refusal, alice: Client, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A view that the middleware could not protect runs as usual."""
        settings.MIDDLEWARE = MIDDLEWARE
        settings.IDEMPOTENCY = OBSERVE
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", refusal.make())]})
        key = new_key()
        seen = [post(alice, "/", key) for _ in range(2)]
        bare = post(without_middleware(alice, settings), "/", key)
        assert [each.status_code for each in seen] == [bare.status_code] * 2
        assert not any(each.has_header("Idempotency-Status") for each in seen)

    def test_as_if_it_were_not_there(self, alice: Client, settings: Any) -> None:
        """The middleware changes no response: not its headers, nor when a template is rendered."""
        for client in (alice, Client()):
            settings.MIDDLEWARE = [*MIDDLEWARE, f"{__name__}.Templates"]
            settings.IDEMPOTENCY = OBSERVE
            observed = [post(client, url, new_key()) for url in ("/plain/", "/plain-page/")]
            bare = without_middleware(client, settings)
            for response, url in zip(observed, ("/plain/", "/plain-page/"), strict=True):
                plain = post(bare, url, new_key())
                assert response.status_code == plain.status_code
                assert response.headers == plain.headers
                assert response.content == plain.content
        assert counts("POST /plain-page/") == {"executed": 2}

    @pytest.mark.parametrize("url", ["/plain/", "/meant/"])
    def test_refused_before_the_view(self, settings: Any, url: str) -> None:
        """Nor does a refusal by another middleware say anything of the key."""
        settings.MIDDLEWARE = MIDDLEWARE
        settings.IDEMPOTENCY = OBSERVE
        meant = observe(create)
        settings.ROOT_URLCONF = type(
            "Urls", (), {"urlpatterns": [path("plain/", create), path("meant/", meant)]}
        )
        response = post(Client(enforce_csrf_checks=True), url, new_key())
        assert response.status_code == 403
        assert not response.has_header("Idempotency-Status")

    @pytest.mark.parametrize("session", ["none", "good", "expired", "of_old_password"])
    @pytest.mark.parametrize("url", ["/plain/", "/plain-who/"])
    def test_session(self, alice: Client, settings: Any, session: str, url: str) -> None:
        """Nor does it change cookies and ``Vary``, whether or not the view asks who is calling."""

        def told(middleware: list[str]) -> tuple[Any, ...]:
            settings.MIDDLEWARE = middleware
            client = Client()
            if session != "none":
                client.force_login(User.objects.get(username="alice"))
            if session == "expired":
                Session.objects.all().delete()
            elif session == "of_old_password":
                User.objects.filter(username="alice").update(password=new_key())
            with CaptureQueriesContext(connection) as captured:
                response = post(client, url, new_key())
            asked = sum("auth_user" in each["sql"] for each in captured.captured_queries)
            return response.content, response.headers, response.cookies.output(), asked

        settings.IDEMPOTENCY = OBSERVE
        plain = told(settings.MIDDLEWARE)
        observed = told(MIDDLEWARE)
        assert observed[:3] == plain[:3]
        if session == "good":
            assert observed[3] == 1
        assert counts() == {"executed": 1}

    def test_no_route(self) -> None:
        """A request that no route led to is counted without its path, which may name a customer."""
        request = RequestFactory().post(
            "/customers/alice/", b"{}", "application/json", headers={"Idempotency-Key": new_key()}
        )
        observe(lambda request: HttpResponse("done"))(request)
        assert counts("POST (no route)") == {"executed": 1}


def without_middleware(client: Client, settings: Any) -> Client:
    """The same caller of the project without this package."""
    settings.MIDDLEWARE = [each for each in settings.MIDDLEWARE if "Idempotency" not in each]
    bare = Client()
    bare.cookies = client.cookies
    return bare


class Templates:
    """A middleware that changes what a template shows."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        response["X-Rendered"] = str(response.is_rendered)
        return response


class TestOutcomes:
    @pytest.mark.parametrize("url", ["/view/", "/class/", "/inner/", "/drf/"])
    def test_first_and_duplicate(self, client: Client, url: str) -> None:
        """The first request with a key is executed, and each later one is a duplicate."""
        key = new_key()
        for _ in range(3):
            post(client, url, key)
        post(client, url, new_key())
        assert effects() == 4
        assert counts() == {"executed": 2, "replayed": 2}

    def test_differs(self, client: Client) -> None:
        """A duplicate that got another response is counted as one, too."""
        key = new_key()
        for _ in range(3):
            post(client, "/view/", key, "new")
        assert counts() == {"executed": 1, "replayed": 2, "differs": 2}

    def test_other_status(self, client: Client, settings: Any) -> None:
        """So did one that got the same body with another status."""
        settings.IDEMPOTENCY = {"POLICY": {"fingerprint": lambda invocation: "same"}}
        key = new_key()
        for status in ("200", "202", "200"):
            post(client, "/view/", key, status)
        assert counts() == {"executed": 1, "replayed": 2, "differs": 1}

    def test_no_key(self, client: Client) -> None:
        """A request without a key is counted, whether or not the policy requires one."""
        for url in ("/view/", "/required/"):
            assert post(client, url).status_code == 201
            assert counts(f"POST {url}") == {"missing": 1}
        assert IdempotencyKey.objects.count() == 0

    def test_bad_key(self, client: Client) -> None:
        """A malformed or guessable key refuses nothing, and is counted."""
        for key in ("", "short"):
            assert post(client, "/view/", key).status_code == 201
        assert counts() == {"refused": 2}

    def test_body_without_its_key(self, client: Client) -> None:
        """Nor does a body that cannot be read for its key."""
        body, media_type = b'{"idempotency_key": "a", "name": "\xe4"}', "application/json"
        response = client.generic("POST", "/dialect/", body, content_type=media_type)
        assert response.content == b"done"
        assert counts() == {"refused": 1}

    def test_derived_key(self, client: Client) -> None:
        """A key that the policy derives is observed like a client's."""
        for _ in range(2):
            post(client, "/natural/")
        assert counts() == {"executed": 1, "replayed": 1}

    def test_mismatch(self, client: Client) -> None:
        """A key that comes with another request is a mismatch."""
        key = new_key()
        post(client, "/view/", key, "a")
        assert post(client, "/view/", key, "b").status_code == 201
        assert counts() == {"executed": 1, "mismatched": 1}

    def test_rotated_secret(self, client: Client, settings: Any) -> None:
        """A duplicate after a rotation of SECRET_KEY is no mismatch."""
        key = new_key()
        post(client, "/view/", key)
        settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], new_key()
        post(client, "/view/", key)
        found = counts()
        assert (found["replayed"], "mismatched" in found) == (1, False)

    def test_two_users(self, settings: Any) -> None:
        """Two users with the same key share no record; in a shared scope, the second mismatches."""
        key = new_key()
        for name in ("alice", "bob"):
            client = Client()
            client.force_login(User.objects.create_user(name))
            post(client, "/view/", key)
            post(client, "/shared/", key)
        assert counts("POST /view/") == {"executed": 2}
        assert counts("POST /shared/") == {"executed": 1, "mismatched": 1}

    @pytest.mark.parametrize(
        ("url", "reference"),
        [("/view/", "500"), ("/view/", "409"), ("/view/", "gone"), ("/drf/", "invalid")],
    )
    def test_released(self, client: Client, url: str, reference: str) -> None:
        """A response that would not be stored leaves the key to the next request."""
        key = new_key()
        client.raise_request_exception = False
        for _ in range(2):
            post(client, url, key, reference)
        assert counts() == {"released": 2}

    @pytest.mark.parametrize("url", ["/view/", "/async/"])
    def test_failed_duplicate(self, client: Client, url: str, settings: Any) -> None:
        """A duplicate whose view raises was executed again, and its response differs."""
        client.raise_request_exception = False
        key = new_key()
        settings.IDEMPOTENCY = {"POLICY": {"fingerprint": lambda invocation: "same"}}
        post(client, url, key, "a")
        assert post(client, url, key, "boom").status_code == 500
        assert counts() == {"executed": 1, "replayed": 1, "differs": 1}

    def test_in_progress(self, client: Client) -> None:
        """A duplicate that began before the first request ended would have been refused."""
        key = new_key()
        both = threading.Barrier(2, timeout=20)
        paused["a"] = both.wait
        in_threads([lambda: post(Client(), "/view/", key)] * 2)
        assert effects() == 2
        paused.clear()
        post(client, "/view/", key)
        assert counts() == {"executed": 1, "in_progress": 1, "replayed": 1}

    def test_storm(self) -> None:
        """However many requests come at once, each is counted."""
        key = new_key()
        own = [key if number % 2 else new_key() for number in range(8)]
        in_threads([partial(post, Client(), "/view/", each) for each in own])
        found = counts()
        assert effects() == 8
        assert found["executed"] == 5
        assert found.get("in_progress", 0) + found.get("replayed", 0) == 3

    def test_streams_and_pages(self, client: Client) -> None:
        """A stream is read by its view and sent as ever; a page is recorded when it is rendered."""
        key = new_key()
        for _ in range(2):
            response = post(client, "/stream/", key)
            assert b"".join(response.streaming_content) == b'{"rdone'
            post(client, "/page/", key)
        assert counts("POST /stream/") == {"executed": 1, "replayed": 1}
        assert counts("POST /page/") == {"executed": 1, "replayed": 1}

    def test_async(self) -> None:
        """An async view is observed, too."""
        key = new_key()

        async def send() -> None:
            client = AsyncClient()
            for _ in range(2):
                await client.post(
                    "/async/",
                    json.dumps({"reference": "a"}),
                    content_type="application/json",
                    headers={"Idempotency-Key": key},
                )

        asyncio.run(send())
        assert effects() == 2
        assert counts() == {"executed": 1, "replayed": 1}

    def test_cancelled(self, client: Client) -> None:
        """An async view that is cancelled leaves nothing behind: a retry is the first request."""
        key = new_key()

        async def send() -> None:
            begun = asyncio.Event()

            paused["begun"] = begun.set
            task = asyncio.create_task(observe(ahanging)(request_with(key)))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    paused["begun"] = partial(limit.reschedule, 0)
                    await observe(ahanging)(request_with(key))

        asyncio.run(send())
        assert (effects(), IdempotencyKey.objects.count(), counts()) == (2, 0, {})
        assert asyncio.run(observe(acreate)(request_with(key))).status_code == 201
        assert counts() == {"executed": 1}

    def test_cancelled_while_it_is_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the client leaves when its view has ended, the request is still recorded."""
        key, write = new_key(), shadow._Observation._write
        go_on, ended = threading.Event(), threading.Event()

        async def send() -> None:
            loop, writing = asyncio.get_running_loop(), asyncio.Event()

            def slow(self: Any, *args: Any) -> None:
                loop.call_soon_threadsafe(writing.set)
                assert go_on.wait(20)
                write(self, *args)
                ended.set()

            monkeypatch.setattr(shadow._Observation, "_write", slow)
            task = asyncio.create_task(observe(acreate)(request_with(key)))
            await writing.wait()
            task.cancel()
            loop.call_soon(go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(send())
        assert ended.wait(20)
        assert (effects(), counts()) == (1, {"executed": 1})

    def test_not_views(self, settings: Any) -> None:
        """What is no view is protected, whatever the project observes."""
        settings.IDEMPOTENCY = OBSERVE
        for _ in range(2):
            idempotent_call(lambda _: Effect.objects.create(reference="a").pk, key="a", scope="b")
        assert effects() == 1
        assert counts() == {}


def request_with(key: str) -> HttpRequest:
    """A request to an async view, without a route."""
    body = json.dumps({"reference": "a"})
    headers = {"Idempotency-Key": key}
    return AsyncRequestFactory().post("/", body, "application/json", headers=headers)


class Source(BytesIO):
    """A server's input, which cannot be read twice. A ``!`` in it is where the connection broke."""

    def seekable(self) -> bool:
        return False

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if b"!" in data:
            raise OSError
        return data


class Disk(bodies._File):
    """A file on a disk that has only so much room."""

    room = 0

    def write(self, data: Any, /) -> int:
        left = self.room - self.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:left])


class TestBodies:
    @pytest.mark.parametrize("url", ["/chunks/", "/lines/"])
    def test_too_long_to_compare(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A view that streams reads all of a body that is too long for the fingerprint."""
        monkeypatch.setattr(bodies, "CHUNK", 2)
        monkeypatch.setattr(bodies, "LONGEST", 16)
        key, body = new_key(), b"line 1\nline 2\nline 3"
        read = body if url == "/chunks/" else b"line 1\n|line| 2\n|line 3"
        for _ in range(2):
            assert send(url, key, body).content == read
        send(url, key, b"other")
        assert counts() == {"executed": 1, "replayed": 1, "mismatched": 1}

    @pytest.mark.parametrize("limit", [0, 100])
    def test_broken(self, client: Client, settings: Any, limit: int) -> None:
        """A view that reads a body whose connection broke meets the same error."""
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = limit
        for url in ("/read/", "/plain-read/"):
            with pytest.raises(UnreadablePostError):
                send(url, new_key(), b"abcdef!", CONTENT_LENGTH=20)

    @pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=b"])
    @pytest.mark.parametrize("room", [0, 5, 12, None])
    def test_full_disk(
        self, settings: Any, kind: str, room: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A view reads all of a body that could be kept nowhere; one that is protected never runs.

        The disk has room for so many bytes; ``None``: the folder does not exist.
        """
        settings.FILE_UPLOAD_MAX_MEMORY_SIZE = settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 8
        monkeypatch.setattr(bodies, "CHUNK", 3)
        if room is None:
            settings.FILE_UPLOAD_TEMP_DIR = "/nonexistent"
        else:
            monkeypatch.setattr(Disk, "room", room)
            monkeypatch.setattr(bodies, "_File", Disk)
        body = b"line 1\nline 2\nline 3"
        chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
        for environ in (chunked, {"CONTENT_LENGTH": len(body)}):
            for url in ("/chunks/", "/lines/", "/read/")[: 2 if environ is chunked else 3]:
                read = b"line 1\n|line| 2\n|line 3" if url == "/lines/" else body
                assert send(url, new_key(), body, kind, **environ).content == read
            with pytest.raises(OSError, match=r"space|nonexistent"):
                send("/enforced-create/", new_key(), body, kind, **environ)
        assert effects() == 0

    def test_half(self) -> None:
        """A view gets all that has come of a form whose end is missing."""
        form = b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1"
        for url in ("/read/", "/plain-read/"):
            kind = "multipart/form-data; boundary=b"
            assert send(url, new_key(), form, kind, CONTENT_LENGTH=99).content == form


def send(
    url: str, key: str, body: bytes, content_type: str = "text/plain", **environ: Any
) -> HttpResponse:
    """The response to a body from a server, in chunks unless its length is given."""
    if not environ:
        environ = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    environ |= {"wsgi.input": Source(body), "CONTENT_TYPE": content_type}
    headers = {"Idempotency-Key": key}
    return Client().generic("POST", url, headers=headers, **environ)  # type: ignore[return-value]


class TestTransactions:
    @pytest.fixture(autouse=True)
    def _atomic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    @pytest.mark.parametrize("url", ["/view/", "/class/", "/inner/", "/drf/"])
    def test_duplicate(self, client: Client, url: str) -> None:
        """The record waits for the end of the request's transaction, and is in none."""
        key = new_key()
        for _ in range(2):
            assert post(client, url, key).status_code == 201
        assert effects() == 2
        assert counts() == {"executed": 1, "replayed": 1}

    @pytest.mark.parametrize("url", ["/view/", "/class/", "/drf/"])
    def test_rolled_back(self, client: Client, url: str) -> None:
        """What rolls back is counted as such: a retry of it has to execute."""
        client.raise_request_exception = False
        reference = "invalid" if url == "/drf/" else "boom"
        post(client, url, new_key(), reference)
        assert effects(reference) == 0
        assert counts() == {"released": 1}

    @pytest.mark.parametrize("url", ["/giving-up/", "/page-giving-up/"])
    def test_marked_for_rollback(self, client: Client, url: str) -> None:
        """So is what a view rolls back without an error."""
        for key in [new_key()] * 2:
            assert post(client, url, key).status_code == 200
        assert effects() == 0
        assert counts() == {"released": 2}

    def test_rolled_back_by_django(self, client: Client) -> None:
        """Where Django's own transaction surrounds the view, one that rolls back is not counted."""
        client.raise_request_exception = False
        post(client, "/inner/", new_key(), "boom")
        assert counts() == {}

    @pytest.mark.parametrize("url", ["/view/", "/class/", "/inner/", "/drf/"])
    def test_callable_fails(self, client: Client, settings: Any, url: str) -> None:
        """A policy's callable that breaks its statement does not break the view's transaction."""

        def scope(invocation: Any) -> str:
            for _ in range(2):
                Effect.objects.create(pk=1, reference="twice")
            raise AssertionError

        settings.IDEMPOTENCY = {"POLICY": Policy(mode="observe", scope=scope)}
        assert post(client, url, new_key()).status_code == 201
        assert (effects(), effects("twice")) == (1, 0)

    def test_statements(self, client: Client) -> None:
        """Within the view's transaction it sends no more than a savepoint."""
        with CaptureQueriesContext(connection) as captured:
            post(client, "/view/", new_key())
        statements = [each["sql"].split()[0] for each in captured.captured_queries]
        view = statements[: statements.index("COMMIT") + 1]
        assert [each for each in view if each not in ("SAVEPOINT", "RELEASE")] == [
            "BEGIN",
            "INSERT",
            "COMMIT",
        ]


class TestSwitching:
    def test_to_enforcing(self, client: Client, settings: Any) -> None:
        """A view that enforces sees no record of when it observed, and the other way around."""
        settings.MIDDLEWARE = MIDDLEWARE
        key = new_key()
        settings.IDEMPOTENCY = OBSERVE
        post(client, "/plain/", key)
        settings.IDEMPOTENCY = {}
        assert not is_replay(post(client, "/plain/", key))
        assert is_replay(post(client, "/plain/", key))
        assert effects() == 2
        settings.IDEMPOTENCY = OBSERVE
        assert not is_replay(post(client, "/plain/", key))
        assert counts() == {"executed": 1, "replayed": 1}

    def test_long_key(self, client: Client) -> None:
        """The longest key is observed, and two of them are two."""
        for key in ("k" * 255, "k" * 254 + "l", "k" * 255):
            post(client, "/view/", key)
        assert counts() == {"executed": 2, "replayed": 1}

    def test_purge(self, client: Client) -> None:
        """Its records expire like others, and the purge deletes them."""
        key = new_key()
        post(client, "/view/", key)
        IdempotencyKey.objects.update(expires_at=LONG_AGO, purge_at=LONG_AGO)
        post(client, "/view/", key)
        assert counts() == {"executed": 2}
        IdempotencyKey.objects.update(expires_at=LONG_AGO, purge_at=LONG_AGO)
        call_command("purge_idempotency_keys", verbosity=0)
        assert IdempotencyKey.objects.count() == 0

    def test_expired(self, client: Client, settings: Any) -> None:
        """An expired record makes no duplicate of a request whose response is not stored."""
        settings.IDEMPOTENCY = {"POLICY": {"fingerprint": lambda invocation: "same"}}
        key = new_key()
        post(client, "/view/", key)
        IdempotencyKey.objects.update(expires_at=LONG_AGO)
        post(client, "/view/", key, "409")
        assert counts() == {"executed": 1, "released": 1}

    def test_no_replays(self, client: Client) -> None:
        """Nor does a record count as replays what was executed."""
        key = new_key()
        for _ in range(2):
            post(client, "/view/", key)
        assert IdempotencyKey.objects.get().replay_count == 0

    @pytest.mark.parametrize("field", ["retention", "key_ttl"])
    def test_kept(self, client: Client, settings: Any, field: str) -> None:
        """Nor is it kept for the audit, or to reserve its key, when it has expired."""
        month = timedelta(days=30)
        settings.IDEMPOTENCY = {"POLICY": {"mode": "observe", field: month}}
        post(client, "/view/", new_key())
        [record] = IdempotencyKey.objects.all()
        assert record.purge_at == record.expires_at

    def test_permanent(self, client: Client, settings: Any) -> None:
        """A record of the shadow mode is never kept forever."""
        settings.IDEMPOTENCY = {"POLICY": {"mode": "observe", "ttl": None}}
        post(client, "/view/", new_key())
        assert IdempotencyKey.objects.get().expires_at is not None


class TestStores:
    def test_statements(self, client: Client) -> None:
        """A request with a key costs a claim, its completion and a count; one without, a count."""
        post(client, "/view/", new_key())
        post(client, "/view/")
        with CaptureQueriesContext(connection) as first:
            post(client, "/view/", new_key())
        with CaptureQueriesContext(connection) as keyless:
            post(client, "/view/")
        words = [each["sql"].split()[0] for each in first.captured_queries]
        locks = 2 if connection.vendor == "mysql" else 0  # the key's, and its release
        assert len([word for word in words if word not in ("BEGIN", "COMMIT")]) == 1 + 3 + locks
        assert len(keyless.captured_queries) == 2

    def test_redis(self, client: Client, settings: Any, redis_server: Server) -> None:
        """The records are in the policy's store, and the counts in the database."""
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        settings.CACHES = {"default": cache}
        settings.IDEMPOTENCY = {
            **OBSERVE,
            "STORES": {"default": {"BACKEND": REDIS}},
        }
        key = new_key()
        for reference in ("a", "a", "b"):
            post(client, "/view/", key, reference)
        assert counts() == {"executed": 1, "replayed": 1, "mismatched": 1}
        assert IdempotencyKey.objects.count() == 0

    @pytest.mark.parametrize("url", ["/view/", "/drf/", "/async/"])
    @pytest.mark.parametrize("error", [StoreUnavailable(), OperationalError("gone")])
    def test_away(
        self,
        client: Client,
        url: str,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """While the store is away, views run; it is logged once, and not asked by each request."""
        asked = []

        def acquire(self: Any, operation: Any) -> Any:
            asked.append(operation)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(DatabaseStore, "acquire", acquire)
            with caplog.at_level(logging.ERROR, "idempotency_django"):
                for _ in range(3):
                    assert post(client, url, new_key()).status_code == 201
        assert len(asked) == 1
        assert caplog.text.count("The shadow mode cannot record requests in the store") == 1
        assert effects() == 3
        over = {name: each._replace(until=0.0) for name, each in shadow._failures.items()}
        shadow._failures.update(over)
        post(client, url, new_key())
        assert counts() == {"executed": 1}
        assert not shadow._failures

    @pytest.mark.parametrize("url", ["/view/", "/drf/", "/async/"])
    def test_error_of_one_row(
        self, client: Client, url: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        """After an error that is no outage, the next request is counted.

        It is logged once, and an outage that follows is logged, too.
        """
        acquire, errors = (
            DatabaseStore.acquire,
            {"wrong": IntegrityError, "-gone": OperationalError},
        )

        def failing(self: Any, operation: Any) -> Any:
            if error := errors.get(operation.key[-5:]):
                raise error
            return acquire(self, operation)

        monkeypatch.setattr(DatabaseStore, "acquire", failing)
        monkeypatch.setattr(shadow, "_PAUSE", 1e9)  # however slow the machine is
        for end in ("-wrong", "", "-wrong", ""):
            assert post(client, url, f"{new_key()}{end}").status_code == 201
        assert counts() == {"executed": 2}
        assert caplog.text.count("The shadow mode cannot record requests in the store") == 1
        for _ in range(2):
            assert post(client, url, f"{new_key()}-gone").status_code == 201
        assert caplog.text.count("The shadow mode cannot record requests in the store") == 2
        assert effects() == 6

    def test_callable_fails(self, client: Client, settings: Any, caplog: Any) -> None:
        """An error of a policy's callable is logged, and the view runs."""

        def scope(invocation: Any) -> str:
            Effect.objects.get(reference="nobody")
            raise AssertionError

        settings.IDEMPOTENCY = {"POLICY": Policy(mode="observe", scope=scope)}
        for _ in range(2):
            assert post(client, "/view/", new_key()).status_code == 201
        assert caplog.text.count("The shadow mode cannot identify requests of POST /view/") == 1
        assert counts() == {}

    @pytest.mark.parametrize("atomic", [False, True])
    def test_outage_after_the_view(
        self, client: Client, atomic: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        """If the database goes away when the view has committed, its response is sent."""
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
        assert post(client, "/outage/", new_key()).status_code == 201
        assert "The shadow mode cannot record requests in the store" in caplog.text
        with suppress(Exception):  # PyMySQL complains that it is closed already
            connection.close()
        assert effects() == 1
        assert counts() == {}

    @pytest.fixture
    def impatient(self) -> Iterator[None]:
        """A lock is an error at once."""
        setting = {
            "postgresql": "SET lock_timeout = '1ms'",
            "mysql": "SET SESSION innodb_lock_wait_timeout = 0",
            "sqlite": "PRAGMA busy_timeout = 0",
        }
        with connection.cursor() as cursor:
            cursor.execute(setting[connection.vendor])
        yield
        connection.close()

    @pytest.mark.usefixtures("impatient")
    def test_locked(self, client: Client, caplog: pytest.LogCaptureFixture) -> None:
        """A request whose count is locked is not counted, which is logged; the next one is."""
        post(client, "/deriving/")
        with locked_counts():
            for _ in range(2):
                assert post(client, "/deriving/").status_code == 200
        assert caplog.text.count("The shadow mode cannot record requests in the store") == 1
        assert post(client, "/deriving/").status_code == 200
        assert counts() == {"missing": 2}

    @pytest.mark.usefixtures("impatient")
    def test_conflict(self, client: Client, caplog: Any, monkeypatch: Any) -> None:
        """After a conflict with another transaction, such as a deadlock, it counts again."""
        monkeypatch.setattr(shadow, "_RETRY_SECONDS", 1e9)  # however slow the machine is
        post(client, "/deriving/")
        lock = ExitStack()
        lock.enter_context(locked_counts())

        def ending(execute: Any, *args: Any) -> Any:
            try:
                return execute(*args)
            except OperationalError:
                lock.close()
                raise

        with lock, connection.execute_wrapper(ending):
            assert post(client, "/deriving/").status_code == 200
        assert "The shadow mode" not in caplog.text
        assert counts() == {"missing": 2}

    def test_redis_away(
        self, client: Client, settings: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While Redis is away, not every request tries to connect to it."""
        asked, acquire = [], RedisStore.acquire

        def noting(self: Any, operation: Any) -> Any:
            asked.append(operation)
            return acquire(self, operation)

        monkeypatch.setattr(RedisStore, "acquire", noting)
        monkeypatch.setattr(shadow, "_PAUSE", 1e9)
        nobody = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1"}
        settings.CACHES = {"default": nobody}
        settings.IDEMPOTENCY = {**OBSERVE, "STORES": {"default": {"BACKEND": REDIS}}}
        for _ in range(3):
            assert post(client, "/view/", new_key()).status_code == 201
        assert (len(asked), effects(), counts()) == (1, 3, {})
        assert caplog.text.count("The shadow mode cannot record requests in the store") == 1

    def test_wrong_store(self, client: Client, settings: Any, caplog: Any) -> None:
        """A store that does not exist is logged, too."""
        settings.IDEMPOTENCY = {"POLICY": {"mode": "observe", "store": "none"}}
        assert post(client, "/view/", new_key()).status_code == 201
        assert post(client, "/view/").status_code == 201
        assert "The shadow mode cannot" in caplog.text


@contextmanager
def locked_counts() -> Iterator[None]:
    """Another transaction has locked the counts for the length of the block."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE" if connection.vendor == "sqlite" else "BEGIN")
            cursor.execute(f"UPDATE {IdempotencyObservation._meta.db_table} SET place = place")
            yield
            cursor.execute("ROLLBACK")
    finally:
        other.close()


class TestInATestCase(TestCase):
    def test_duplicate(self) -> None:
        """In a test's transaction it counts as elsewhere."""
        key = new_key()
        for _ in range(2):
            post(self.client, "/view/", key)
        assert counts() == {"executed": 1, "replayed": 1}

    def test_within_a_transaction(self) -> None:
        """What a caller's transaction rolls back is not counted."""
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            post(self.client, "/view/", new_key())
            assert counts() == {}
        assert counts() == {"executed": 1}


def report(*arguments: str) -> str:
    """What ``idempotency_report --shadow`` says."""
    written = StringIO()
    call_command("idempotency_report", "--shadow", *arguments, stdout=written)
    return written.getvalue()


class TestReport:
    @pytest.fixture(autouse=True)
    def _traffic(self, client: Client) -> None:
        key = new_key()
        for _ in range(3):
            post(client, "/mailing/", key)
        post(client, "/mailing/")
        post(client, "/view/", new_key())

    def test_table(self) -> None:
        """The table has each observed endpoint, the worst first, and what its view repeated."""
        text = report()
        lines = text.splitlines()
        assert lines[0].split("  ")[0] == "Endpoint"
        mailing = next(line for line in lines if line.startswith("POST /mailing/"))
        assert mailing.split()[2:] == ["4", "2", "0", "0", "1", "0", "0"]
        assert lines[1] == mailing
        assert lines[2].startswith("    It started true at tests/test_shadow.py:")
        assert lines[2].endswith(", 2 times again.")
        assert any(line.split() == ["POST", "/inner/", *"0000000"] for line in lines)
        assert re.search(r"\n1 of \d+ observed endpoints had duplicates: 2 since 20", text)

    def test_json(self) -> None:
        """Programs get the same, with the place of the view."""
        first, *others = json.loads(report("--format", "json"))["endpoints"]
        assert first["endpoint"] == "POST /mailing/"
        assert first["counts"]["replayed"] == 2
        assert first["effects"][0]["kind"] == "process"
        assert first["effects"][0]["repeated"] == 2
        assert {each["endpoint"] for each in others} >= {"POST /view/", "POST /drf/"}

    def test_reset(self) -> None:
        """The counts start again, for example after a change of the clients."""
        report("--reset")
        assert IdempotencyObservation.objects.count() == 0
        assert "0 of" in report()

    def test_what_is_not_observed(self, settings: Any) -> None:
        """A view that cannot be protected is named, too. One that takes any method is listed by
        it until its methods are known by their requests.
        """
        settings.IDEMPOTENCY = OBSERVE
        settings.MIDDLEWARE = MIDDLEWARE
        refused = next(each for each in ways.REFUSED if each.by == "middleware")
        patterns = [path("any/", create), path("refused/", refused.make())]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
        assert re.search(r"(?m)^\* /any/ +0", report())
        post(Client(), "/any/", new_key())
        text = report()
        assert re.search(r"(?m)^POST /any/ +1", text)
        assert "* /any/" not in text
        names = "they cannot be protected: * /refused/. See idempotency_report."
        assert text.endswith(f"\nNot observed, because {names}\n")
        assert json.loads(report("--format", "json"))["not_observed"] == ["* /refused/"]

    def test_arguments(self) -> None:
        """What makes no sense together is refused."""
        with pytest.raises(CommandError, match="--shadow does not take --fail-on"):
            report("--fail-on", "broken")
        with pytest.raises(CommandError, match="--reset needs --shadow"):
            call_command("idempotency_report", "--reset")

    def test_not_migrated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without its table, the command says what to do."""
        monkeypatch.setattr(IdempotencyObservation._meta, "db_table", "missing")
        with (
            pytest.raises(CommandError, match=r"(?s)missing.*manage.py migrate"),
            transaction.atomic(),
        ):
            call_command("idempotency_report", "--shadow")

    def test_not_protected(self) -> None:
        """Observed is not protected: neither in the report nor for what promises something."""
        found = {f"{each.method} {each.route}": each for each in endpoints()}
        assert found["POST /drf/"].policy is not None
        assert found["POST /drf/"].enforced is None
        assert found["POST /enforced/"].enforced is not None
        written = StringIO()
        with pytest.raises(CommandError, match=re.escape("POST /drf/ (observed)")):
            call_command("idempotency_report", "--fail-on", "observed", stdout=written)
        assert re.search(r"POST +/drf/ +observed +mixin +observe ", written.getvalue())


def test_openapi() -> None:
    """The schema promises nothing for an observed endpoint."""
    patterns = [path("drf/", DRF.as_view()), path("enforced/", Enforced.as_view())]
    with CaptureQueriesContext(connection):
        schema = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    assert "x-idempotency" in schema["paths"]["/enforced/"]["post"]
    operation = schema["paths"]["/drf/"]["post"]
    assert "x-idempotency" not in operation
    assert "parameters" not in operation
    assert list(operation["responses"]) == ["200"]


class TestExecution:
    """What the view finds in ``request.idempotency``: an execution whose steps are called."""

    @pytest.mark.parametrize("url", ["/stepping/", "/astepping/", "/stepping-drf/"])
    @pytest.mark.parametrize("key", ["good", "bad", None])
    def test_steps(self, client: Client, url: str, key: str | None) -> None:
        """A view that uses steps is executed each time, with any key, or without one."""
        sent = new_key() if key == "good" else key
        for _ in range(2):
            assert post(client, url, sent).status_code == 201
        assert effects() == 2
        expected = {"good": {"executed": 1, "replayed": 1}, "bad": {"refused": 2}}
        found = counts()
        found.pop("differs", None)
        assert found == expected.get(str(key), {"missing": 2})

    def test_derived_keys(self, client: Client, settings: Any) -> None:
        """A key for another service is that of the enforced view, so the service can honour it."""
        key, where = new_key(), "/deriving/"
        observed = [post(client, where, key).content for _ in range(2)]
        assert observed[0] == observed[1]
        routes = [path("deriving/", idempotent(deriving))]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": routes})
        assert post(client, where, key).content == observed[0]

    def test_no_key(self, client: Client) -> None:
        """Where the key is optional, a view without one finds no execution, as ever."""
        assert post(client, "/deriving/").content == b"None"

    def test_identification_that_fails(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor does the view lack it if its caller cannot be identified."""
        monkeypatch.setattr(shadow, "planned", mock.Mock(side_effect=LookupError))
        assert post(client, "/stepping/", new_key()).status_code == 201

    def test_enforced_part(self, client: Client) -> None:
        """A part of an observed view that is enforced is still enforced."""
        key = new_key()
        first, second = (post(client, "/outer/", key) for _ in range(2))
        assert (effects(), is_replay(second)) == (1, True)
        assert first.status_code == 201


class TestNested:
    @pytest.mark.parametrize("url", ["/view/", "/class/", "/inner/", "/drf/", "/async/"])
    @pytest.mark.parametrize("key", [new_key(), "bad", None])
    def test_middleware(self, client: Client, settings: Any, url: str, key: str | None) -> None:
        """A view that is observed by itself and by the middleware is counted once."""
        settings.MIDDLEWARE = MIDDLEWARE
        settings.IDEMPOTENCY = OBSERVE
        for _ in range(2):
            assert post(client, url, key).status_code == 201
        expected = {"bad": {"refused": 2}, None: {"missing": 2}}
        assert counts() == expected.get(key, {"executed": 1, "replayed": 1})

    def test_parts(self, client: Client) -> None:
        """Parts are enforced, or counted with the view that calls them, whose steps go on."""
        key = new_key()
        replays = [post(client, "/parts/", key).json()["replays"] for _ in range(2)]
        assert replays == [[False, False, False], [True, True, False]]
        assert effects() == 2 + 2
        assert counts() == {"executed": 1, "replayed": 1, "differs": 1}

    def test_parts_without_key(self, client: Client) -> None:
        """Also where there is no key."""
        assert post(client, "/parts/").status_code == 201
        assert (effects(), counts()) == (3, {"missing": 1})

    def test_async_parts(self, client: Client) -> None:
        """The same of async views."""
        key = new_key()
        for _ in range(2):
            assert post(client, "/aparts/", key).status_code == 201
        assert (effects(), counts()) == (4, {"executed": 1, "replayed": 1})

    def test_within_enforced(self, client: Client) -> None:
        """What is observed within an enforced view is protected with it, and not counted."""
        key = new_key()
        first, second = (post(client, "/surrounding/", key) for _ in range(2))
        assert (first.status_code, is_replay(second)) == (201, True)
        assert (effects(), counts()) == (1, {})

    def test_mixin(self, client: Client) -> None:
        """A decorator around a view with the mixin changes nothing."""
        key = new_key()
        for _ in range(2):
            assert post(client, "/drf-around/", key).status_code == 201
        assert (effects(), counts()) == (2, {"executed": 1, "replayed": 1})

    def test_items(self, client: Client) -> None:
        """The items of a batch are enforced, and their request is counted."""
        key, item = new_key(), {"idempotency_key": new_key()}
        for _ in range(2):
            response = client.post(
                "/items/", [item], "application/json", headers={"Idempotency-Key": key}
            )
            assert response.status_code == 207
        assert effects() == 1
        assert counts() == {"executed": 1, "replayed": 1, "differs": 1}


class TestCheck:
    @pytest.fixture(autouse=True)
    def _observe(self, settings: Any) -> None:
        settings.IDEMPOTENCY = OBSERVE

    @staticmethod
    def found(settings: Any, *routes: Any) -> dict[str, Any]:
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": routes})
        return {str(m.id)[-4:]: m for m in run_checks() if "idempotency_django." in str(m.id)}

    def test_no_longer_protected(self, settings: Any) -> None:
        """Views that say themselves that they are protected are named if they only observe."""
        settings.MIDDLEWARE = MIDDLEWARE

        class Declared(View):
            idempotency_policy = Policy(required=True)
            post = Django.post

        found = self.found(
            settings,
            path("one/", require_POST(idempotent(required=True)(create))),
            path("two/", Enforced.as_view()),
            path("three/", Declared.as_view()),
            path("auto/", require_POST(idempotent(mode="auto")(create))),
            path("leased/", require_POST(idempotent(mode="leased")(create))),
            path("meant/", observe(create)),
            path("drf/", DRF.as_view()),
            path("plain/", create),
        )
        assert set(found) == {"W069"}
        assert "/one/, /two/, /three/" in found["W069"].msg
        assert 'mode="auto"' in found["W069"].hint

    def test_observes_nothing(self, settings: Any) -> None:
        """A project that observes, and has nothing that does so, would never see a duplicate."""
        plain, enforced = path("plain/", create), path("auto/", idempotent(mode="auto")(create))
        found = self.found(settings, plain, enforced)
        assert set(found) == {"W071"}
        assert "IdempotencyMiddleware" in found["W071"].hint
        assert "W071" not in self.found(settings, enforced)
        assert "W071" not in self.found(settings, plain, path("meant/", observe(create)))
        settings.MIDDLEWARE = MIDDLEWARE
        assert "W071" not in self.found(settings, plain)
        settings.IDEMPOTENCY = {**OBSERVE, "MIDDLEWARE_PROTECTS": "with-policy"}
        assert set(self.found(settings, plain)) == {"W071"}

    @pytest.mark.parametrize("mode", ["auto", "leased"])
    def test_project_that_enforces(self, settings: Any, mode: str) -> None:
        """Where the project enforces, nothing is said."""
        settings.IDEMPOTENCY = {"POLICY": {"mode": mode}}
        assert self.found(settings, path("one/", idempotent(create))) == {}

    @pytest.mark.parametrize(
        "refusal",
        [pytest.param(each, id=each.name) for each in ways.REFUSED if each.by == "middleware"],
    )
    def test_what_cannot_be_protected(self, refusal: ways.Refusal, settings: Any) -> None:
        """A view that the middleware could not protect is no error yet, but it is not observed."""
        settings.MIDDLEWARE = MIDDLEWARE
        found = self.found(settings, path("one/", refusal.make()))
        assert set(found) == {"W072"}
        assert "It serves /one/" in found["W072"].hint
        assert "It is not observed" in found["W072"].hint


class TestEffects:
    def test_after_the_commit(self, client: Client) -> None:
        """What a view does in its own on_commit() hook is no effect of the view."""
        key = new_key()
        for _ in range(2):
            post(client, "/later/", key)
        assert counts("POST /later/", zeros=True) == {"executed": 1, "replayed": 1}

    def test_files(self, client: Client, tmp_path: Path) -> None:
        """A file is counted without its name, which may be a customer's; in a loop, it is one."""
        post(client, f"/exporting/?folder={tmp_path}", new_key())
        row = IdempotencyObservation.objects.get(what="file")
        assert row.peer == "a file"
        assert "It wrote to a file at tests/test_shadow.py:" in report()

    def test_noted_at_first(self, client: Client) -> None:
        """An effect is known from the first request on, before any duplicate repeats it."""
        post(client, "/mailing/", new_key())
        assert counts("POST /mailing/", zeros=True) == {"executed": 1, "process": 0}

    def test_in_a_loop(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A line of code is one effect, however many peers it has: it takes no room for each."""
        seen: list[Any] = []
        count = shadow._Observation._count

        def counting(self: Any, counters: Any, *, differs: bool) -> None:
            seen.extend(self.effects)
            count(self, counters, differs=differs)

        monkeypatch.setattr(shadow._Observation, "_count", counting)
        post(client, "/looping/", new_key())
        assert len(seen) == 1
        assert IdempotencyObservation.objects.get(what="network").peer == "127.0.0.1:20000"

    def test_odd_names(self, client: Client) -> None:
        """A name that is no text is counted as one, on one line; it stops no other count."""
        client.raise_request_exception = False
        for _ in range(2):
            post(client, "/starting/", new_key())
        row = IdempotencyObservation.objects.get(what="process")
        assert row.peer == r"/nowhere/\udcff\x08"
        assert counts("POST /starting/") == {"released": 2}

    def test_counted_at_the_same_time(self) -> None:
        """Two processes that count something for the first time at once are both counted."""
        add = partial(IdempotencyObservation.objects.add, "POST /", "executed")

        def faster(execute: Any, sql: str, *args: Any) -> Any:
            result = execute(sql, *args)
            if sql.startswith("UPDATE"):
                others.pop(0, bool)()
            return result

        others = {0: add}
        with connection.execute_wrapper(faster):
            add()
        assert counts() == {"executed": 2}

    def test_count_that_fails(self) -> None:
        """A count that fails within a transaction, such as a test's, does not spoil it."""
        with transaction.atomic():
            with pytest.raises((DatabaseError, OverflowError)):
                IdempotencyObservation.objects.add("POST /", "executed", by=2**65)
            IdempotencyObservation.objects.add("POST /", "executed")
        assert counts() == {"executed": 1}

    def test_odd_places(self) -> None:
        """Nor does a file of code, or what the system tells in other ways."""
        IdempotencyObservation.objects.add("POST /\x00/", "file", "shop/\udcff\n.py:1", "a\nb")
        row = IdempotencyObservation.objects.get()
        told = (row.endpoint, row.place, row.peer)
        assert told == (r"POST /\x00/", r"shop/\udcff\n.py:1", r"a\nb")
