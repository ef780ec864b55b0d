"""What a request says is logged on one line, and forges no other."""

from __future__ import annotations

import logging
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.test import Client
from django.urls import path
from rest_framework.views import APIView

import idempotency_django
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.stores import stores
from tests.support.shared import new_key

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

FORGED = "/x/a%0AERROR%20root:%20forged%0D%1B[2K%E2%80%A8%E2%80%AE/"
"""A path that begins a line of its own, clears one, and turns its direction."""

ESCAPED = r"/x/a\nERROR root: forged\r\x1b[2K\u2028\u202e/"


class Responds(APIView):
    """Does everything in its ``dispatch()``."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse("done", "text/plain")


class Unseen(IdempotentViewMixin, Responds):
    """Its handler, which is protected, does not run."""

    def post(self, request: HttpRequest, rest: str) -> HttpResponse:
        raise AssertionError


@idempotent
def no_response(request: HttpRequest, rest: str) -> Any:
    if request.headers.get("X-Broken"):
        return None
    return HttpResponse("done", "text/plain")


def consumed(request: HttpRequest, rest: str) -> Any:
    """Takes the stream before the key is looked up."""
    request.read()
    return no_response(request, rest)


protected = Unseen.as_view()


def either(request: HttpRequest, rest: str) -> Any:
    kind = request.headers["X-Kind"]
    return {"unseen": protected, "consumed": consumed}.get(kind, no_response)(request, rest)


urlpatterns = [path("x/<rest>/", either)]


def send(kind: str, **extra: Any) -> Any:
    headers = {"Idempotency-Key": new_key(), "X-Kind": kind, **extra.pop("headers", {})}
    return Client().generic("POST", FORGED, b"body", headers=headers, **extra)


def test_path(unprotected: list[logging.LogRecord]) -> None:
    """A path with line breaks is logged on one line."""
    assert send("unseen").status_code == 200
    [logged] = unprotected
    unprotected.clear()
    assert f"it responded to POST {ESCAPED} with 200" in logged.getMessage()
    assert logged.getMessage().isprintable()


def test_operation(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is an operation that is called by its path, with the traceback of our own error."""

    def unavailable(*_: Any) -> Any:
        raise idempotency_django.errors.StoreUnavailable

    monkeypatch.setattr("idempotency_django.http.invocations.name_of_route", lambda _: "x/\n")
    monkeypatch.setattr(stores["default"], "acquire", unavailable)
    assert send("view").status_code == 503
    [logged] = [each for each in caplog.records if each.name == "idempotency_django"]
    assert logged.getMessage() == r"POST x/\n failed with an idempotency error."


@pytest.mark.parametrize(
    ("kind", "error", "extra"),
    [
        ("view", TypeError, {"headers": {"X-Broken": "1"}}),
        ("consumed", ImproperlyConfigured, {}),
        ("view", UnreadablePostError, {"CONTENT_LENGTH": "9", "wsgi.input": BytesIO(b"half")}),
    ],
)
def test_errors(kind: str, error: type[Exception], extra: dict[str, Any]) -> None:
    """The errors that name a path, and are logged by Django, have it on one line, too."""
    with pytest.raises(error) as caught:
        send(kind, **extra)
    assert ESCAPED in str(caught.value)
    assert str(caught.value).isprintable()


def test_everything_that_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the package logs is escaped; a harmless message stays as it is."""
    logger = logging.getLogger("idempotency_django")
    logger.warning("%s of %d: %s", ValueError("two\nlines"), 1, "100 %s\n")
    logger.warning("Grüße an %s", "Zoë")
    assert caplog.messages == [r"two\nlines of 1: 100 %s\n", "Grüße an Zoë"]
    assert caplog.records[1].args == ("Zoë",)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.warning("%d", "no number")  # no error of the program


def test_every_module_logs_under_that_name() -> None:
    """No module of the package has another logger, which would escape nothing."""
    folder = Path(idempotency_django.__file__).parent
    named = {
        name
        for file in folder.rglob("*.py")
        for name in re.findall(r"getLogger\((.*?)\)", file.read_text())
    }
    assert named == {'"idempotency_django"'}
