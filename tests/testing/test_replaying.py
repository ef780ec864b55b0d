"""``--idempotency-replay``, request by request: what is a finding, and what is not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from django.contrib.auth import logout
from django.contrib.auth.models import User
from django.core import mail
from django.core.cache import cache
from django.db import connection, models, transaction
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.exceptions import ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import idempotency_exempt, idempotent
from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.testing import replaying
from idempotency_django.testing.plugin import IGNORE, OFF
from idempotency_django.testing.replaying import Replays
from tests.models import Effect

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

tasks = Celery("replaying")
tasks.conf.task_always_eager = True


@tasks.task(name="tests.shipped")
def shipped() -> None:
    """Stands for a task."""


@tasks.task(base=IdempotentTask, name="tests.paid", key="paid-{order}")
def paid(order: str) -> None:
    """Stands for a task that is idempotent itself."""


def done(reference: str = "a", using: str = "default") -> HttpResponse:
    Effect.objects.using(using).create(reference=reference)
    return HttpResponse("done", "text/plain", status=201)


@csrf_exempt
def unprotected(request: HttpRequest) -> HttpResponse:
    return done()


@idempotency_exempt
@csrf_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return done()


@csrf_exempt
@idempotent
def protected(request: HttpRequest) -> HttpResponse:
    return done()


class Calls:
    """What the views below have done in a test, outside of the database."""

    count = 0


@csrf_exempt
def odd(request: HttpRequest) -> HttpResponse:
    """Does what its name says."""
    Calls.count += 1
    match request.GET["what"]:
        case "mail":
            mail.send_mail("Hello", "", None, ["carol@example.com"])
        case "hook":
            transaction.on_commit(odd_hook)
        case "task":
            shipped.delay()
        case "idempotent task":
            paid.delay("a")
        case "cache":
            cache.set("visits", cache.get("visits", 0) + 1)
        case "raise":
            raise ValueError("no")
        case "fail":
            done()
            return HttpResponse(status=503)
        case "refuse":
            done()
            return HttpResponse(status=400)
        case "savepoint":
            with suppress(ZeroDivisionError), transaction.atomic():
                done()
                raise ZeroDivisionError
        case "unchanged":
            Effect.objects.filter(reference="missing").update(reference="b")
        case "update":
            Effect.objects.update(reference="b")
        case "count":
            User.objects.update(id=models.F("id") + 1)
        case "session":
            request.session["visits"] = Calls.count
        case "unique":
            User.objects.create(username="erin")
    return HttpResponse("done", "text/plain")


def odd_hook() -> None:
    """Runs after the commit."""


protected_odd = csrf_exempt(idempotent(odd))


@csrf_exempt
@idempotent
def streamed(request: HttpRequest) -> StreamingHttpResponse:
    done()
    return StreamingHttpResponse([b"done"])


class Refusing(IdempotentViewMixin, APIView):
    """Its handler raises, so what it did is rolled back and a retry is executed."""

    authentication_classes = ()

    def post(self, request: Any) -> Response:
        Calls.count += 1
        raise ValidationError(f"no {Calls.count}")


class TokenView(APIView):
    """Ends the token that it was asked with."""

    authentication_classes = (TokenAuthentication,)
    permission_classes = (IsAuthenticated,)

    def post(self, request: Any) -> Response:
        request.auth.delete()
        return Response(status=204)


class ProtectedTokenView(IdempotentViewMixin, TokenView):
    """The same, protected."""


@csrf_exempt
@idempotent
def leave(request: HttpRequest) -> HttpResponse:
    if not request.user.is_authenticated:
        return HttpResponse("who are you?", "text/plain", status=401)
    logout(request)
    return HttpResponse("bye", "text/plain")


@csrf_exempt
@idempotent
def leave_and_buy(request: HttpRequest) -> HttpResponse:
    logout(request)
    return done()


urlpatterns = [
    path("leave/", leave),
    path("leave-and-buy/", leave_and_buy),
    path("unprotected/", unprotected),
    path("protected/", protected),
    path("exempt/", exempt),
    path("odd/", odd),
    path("protected/odd/", protected_odd),
    path("streamed/", streamed),
    path("refusing/", Refusing.as_view()),
    path("token/", TokenView.as_view()),
    path("protected/token/", ProtectedTokenView.as_view()),
]


class Driver:
    """Runs requests as those of one test after another."""

    def __init__(self, replays: Replays) -> None:
        self.replays = replays

    def begin(self, ignore: tuple[str, ...] = (), off: str | None = None) -> None:
        """Begin a test, with this setting, and perhaps with the marker."""
        Calls.count = 0
        config = SimpleNamespace(getini={IGNORE: list(ignore)}.__getitem__)
        item: Any = SimpleNamespace(nodeid="shop/tests.py::test", config=config)
        item.get_closest_marker = {off: True}.get
        self.replays._test = replaying._Test(item)

    @property
    def test(self) -> Any:
        """The test that runs."""
        return self.replays._test

    @property
    def findings(self) -> str:
        """What was found."""
        return "".join(self.test.findings)


@pytest.fixture(autouse=True)
def _mailer(settings: Any) -> None:
    """Django 6.1 asks for one; older versions don't read it."""
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}


@pytest.fixture
def driver() -> Iterator[Driver]:
    replays = Replays()
    replays.pytest_sessionstart()
    driver = Driver(replays)
    driver.begin()
    cache.clear()
    yield driver
    replays.pytest_sessionfinish()


KEY = {"Idempotency-Key": "2d0e0bd4-4a83-4ac2-9ea3-4c5c8a3c8a31"}


# What is sent twice.


def test_unprotected(driver: Driver, client: Client) -> None:
    """A second INSERT is a finding, with what to do; the test sees the first effect only."""
    assert client.post("/unprotected/").status_code == 201
    assert Effect.objects.count() == 1
    assert "POST /unprotected/ of shop/tests.py::test was sent again, and had an effect:" in (
        driver.findings
    )
    assert "INSERT INTO" in driver.findings
    assert "Protect it with" in driver.findings


def test_protected(driver: Driver, client: Client) -> None:
    """A protected view gets a key, and its retry a replay: no finding."""
    client.post("/protected/")
    client.post("/protected/", headers=KEY)
    assert Effect.objects.count() == 2
    assert (driver.findings, driver.test.counts["sent"]) == ("", 2)


def test_not_sent(driver: Driver, client: Client) -> None:
    """Exempt views, missing pages, and pages that are only read, are asked once."""
    client.post("/exempt/")
    client.post("/missing/")
    client.get("/unprotected/")
    assert driver.test.counts["sent"] == 0


def test_off(driver: Driver, client: Client) -> None:
    """The marker turns it off for a test; outside of tests it is off."""
    driver.begin(off=OFF)
    client.post("/unprotected/")
    assert driver.test.counts["sent"] == 0
    driver.replays._test = None
    client.post("/unprotected/")


def test_ignored(driver: Driver, client: Client) -> None:
    """The setting names tables that a retry may write to."""
    driver.begin(ignore=("tests_effect",))
    client.post("/unprotected/")
    assert driver.findings == ""


def test_threads(driver: Driver) -> None:
    """Requests of other threads, as in a race, are sent once."""
    sent = []
    thread = threading.Thread(target=lambda: sent.append(Client().post("/missing/").status_code))
    thread.start()
    thread.join()
    assert sent == [404]
    assert driver.test.counts["sent"] == 0


@pytest.mark.parametrize(
    "path", ["/protected/odd/?what=raise", "/protected/odd/?what=fail", "/refusing/"]
)
def test_failed(driver: Driver, client: Client, path: str) -> None:
    """After an error, a retry is executed, so none is sent."""
    with suppress(ValueError):
        client.post(path)
    assert (Calls.count, driver.test.counts["sent"]) == (1, 0)


# What a retry may do, and what it may not.


@pytest.mark.parametrize(
    ("what", "finding"),
    [
        ("mail", "e-mail 'Hello'"),
        ("hook", "on_commit hook tests.testing.test_replaying.odd_hook"),
        ("task", "task tests.shipped"),
        ("update", "UPDATE"),
    ],
)
def test_effects(driver: Driver, client: Client, what: str, finding: str) -> None:
    """E-mails, hooks, tasks and updates are effects; a protected view repeats none of them."""
    Effect.objects.create(reference="a")
    client.post(f"/protected/odd/?what={what}", headers=KEY)
    assert driver.findings == ""
    client.post(f"/odd/?what={what}")
    assert finding in driver.findings
    assert len(mail.outbox) == (2 if what == "mail" else 0)
    assert len([each for each in connection.run_on_commit if each[1] is odd_hook]) == (
        2 if what == "hook" else 0
    )


@pytest.mark.parametrize(
    "what", ["savepoint", "unchanged", "cache", "session", "unique", "refuse", "idempotent task"]
)
def test_no_effects(driver: Driver, client: Client, what: str) -> None:
    """Not an effect: rows rolled back, sessions, caches, what the database refuses, refusals."""
    client.post(f"/odd/?what={what}")
    assert driver.findings == ""
    assert client.session.get("visits") == (1 if what == "session" else None)
    assert Calls.count == (1 if what == "refuse" else 2)
    assert cache.get("visits") == (1 if what == "cache" else None)


def test_logout(driver: Driver, client: Client) -> None:
    """After the first response has ended the session, its retry is another caller's."""
    client.force_login(User.objects.create_user("carol"))
    assert client.post("/leave/").status_code == 200
    assert (driver.test.counts["sent"], driver.findings) == (1, "")
    assert client.post("/leave/").status_code == 401


def test_another_callers_effect(driver: Driver, client: Client) -> None:
    """An effect of such a retry is a finding: its client does the work a second time."""
    client.force_login(User.objects.create_user("carol"))
    assert client.post("/leave-and-buy/").status_code == 201
    assert "INSERT INTO" in driver.findings
    assert "has ended the session" in driver.findings
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("url", ["/token/", "/protected/token/"])
def test_own_credentials(driver: Driver, client: Client, url: str) -> None:
    """So it is after a response that has ended the caller's token: the retry gets 401."""
    token = Token.objects.create(user=User.objects.create_user("carol"))
    response = client.post(url, headers={"Authorization": f"Token {token}"})
    assert response.status_code == 204
    assert (driver.test.counts["sent"], driver.findings) == (1, "")


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_overwriting_methods(driver: Driver, client: Client, method: str) -> None:
    """PUT, PATCH and DELETE may write the same values again, but neither add nor count."""
    Effect.objects.create(reference="a")
    User.objects.create_user("carol")
    getattr(client, method)("/odd/?what=update")
    assert (driver.test.counts["sent"], driver.findings) == (1, "")
    getattr(client, method)("/odd/?what=count")
    assert "UPDATE" in driver.findings
    driver.begin()
    getattr(client, method)("/unprotected/")
    assert "INSERT" in driver.findings


def test_not_stored(driver: Driver, client: Client) -> None:
    """Where the response is not stored, the retry is refused: no finding."""
    client.post("/streamed/")
    assert (driver.test.counts["sent"], driver.findings) == (1, "")


@pytest.mark.django_db(transaction=True)
def test_committed(driver: Driver, client: Client) -> None:
    """In a test that commits, the second request does not."""
    client.post("/unprotected/")
    client.post("/protected/")
    assert Effect.objects.count() == 2
    assert driver.findings.count("had an effect") == 1


# The plugin. These runs of pytest are within this process, without a database.

SUITE = """
    from io import BytesIO
    from django.core import mail
    from django.test import Client, override_settings
    import pytest

    @override_settings(ROOT_URLCONF="tests.testing.test_replaying")
    @pytest.mark.parametrize("count", [1, 2])
    def test_mail(count):
        stream = {"REQUEST_METHOD": "POST", "PATH_INFO": "/odd/", "wsgi.input": BytesIO()}
        for _ in range(count):
            Client().request(**stream, QUERY_STRING="what=nothing")
        mail.outbox = []
        Client().post("/odd/?what=mail")
        assert len(mail.outbox) == count
"""


def test_plugin(pytester: pytest.Pytester) -> None:
    """A test that would pass fails with its findings; one that fails shows them when it ends."""
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(
        "-p", "no:django", "-p", "no:cacheprovider", "--idempotency-replay", "--strict-markers"
    )
    result.assert_outcomes(failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "POST /odd/ of *[[]2[]]*",
            "POST /odd/ of test_plugin.py::test_mail[[]1[]] was sent again, and had an effect:",
            "    e-mail 'Hello'",
            "Nothing protects this endpoint*",
            "*assert 1 == 2*",
            "unsafe requests: 5; sent twice: 2; findings: 2",
        ]
    )


def test_no_django() -> None:
    """pytest loads the plugin in every project, so it imports no Django."""
    program = "import idempotency_django.testing.plugin, sys; assert 'django' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
