"""The HTTP codec: requests to calls, responses to payloads and back, errors to problems."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import (
    HttpRequest,
    HttpResponse,
)
from django.http.response import HttpResponseBase
from django.test import RequestFactory, override_settings
from django.test.client import encode_multipart
from django.test.utils import isolate_apps
from django.urls import ResolverMatch
from django.utils.functional import SimpleLazyObject
from hypothesis import assume, example, given
from hypothesis import strategies as st

from idempotency_django import errors
from idempotency_django.http.invocations import (
    body_of,
    key_header,
    operation_name,
    principal_of,
)
from idempotency_django.http.responses import (
    NEVER_STORED_HEADERS,
    error_body,
    payload_of,
    problem_response,
    response_of,
    status_of,
)
from idempotency_django.http.serving import Adapter, serve
from idempotency_django.policy import DEFAULTS, Policy, keys
from idempotency_django.policy.digests import digest
from tests.support.properties import VISIBLE_ASCII

factory = RequestFactory()


def policy(**fields: Any) -> Policy:
    """A whole policy."""
    return Policy(**fields).over(DEFAULTS)


def replay(response: HttpResponseBase, **fields: Any) -> HttpResponse:
    """The response as a retry gets it."""
    return response_of(payload_of(response, policy(**fields)))


def a_post(data: Any = b"{}", content_type: str = "application/json", **extra: Any) -> HttpRequest:
    """A POST request."""
    return factory.post("/orders/?a=1", data, content_type, **extra)


# Who is calling.


class Person:
    """A caller that is no model's."""

    is_authenticated = True

    def __init__(self, pk: object) -> None:
        self.pk = pk


def known(thing: Any) -> Any:
    """An instance of any model, as a user."""
    thing.is_authenticated = True
    return thing


def test_principal_is_the_user() -> None:
    """A user is named by the primary key, also while it is still a lazy object."""
    assert principal_of(User(pk=42)) == "user:42"
    assert principal_of(SimpleLazyObject(lambda: User(pk=42))) == "user:42"


@pytest.mark.parametrize("user", [None, AnonymousUser(), SimpleNamespace(pk=1)])
def test_nobody(user: object) -> None:
    """Callers who are not told apart have no name."""
    assert principal_of(user) == ""


def test_what_authenticated_the_request() -> None:
    """Where there is no user, what authenticated the request names the caller."""
    name = principal_of(AnonymousUser(), Group(pk=1))
    assert name == f"auth:auth.group:{digest('1')}"
    assert principal_of(User(pk=42), Group(pk=1)) == "user:42"


@pytest.mark.parametrize("secret", ["a-secret-token", b"a-secret-token"])
def test_secret_is_not_stored(secret: str | bytes) -> None:
    """A token that is text is hashed: the name of the caller is stored and shown."""
    name = principal_of(None, secret)
    assert name.startswith("auth:")
    assert "secret" not in name
    assert name != principal_of(None, "another")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (User(pk=1), User(pk=2)),
        (User(pk=1), User(pk=11)),
        (User(pk=1), known(Group(pk=1))),
        (User(pk="auth.group:1"), known(Group(pk=1))),
        (User(pk=1), Person(1)),
        (known(Group(pk=1)), Person("auth.group:1")),
    ],
)
def test_two_callers_have_two_names(one: object, other: object) -> None:
    """Two users of any models never have one name, whatever their primary keys are."""
    assert principal_of(one) != principal_of(other)


def test_user_is_not_what_authenticates() -> None:
    """A user and an API key with the same primary key are two callers."""
    assert principal_of(known(Group(pk=1))) != principal_of(None, Group(pk=1))


@isolate_apps("tests")
def test_proxy_is_the_same_user() -> None:
    """A user that was loaded through a proxy model is the same caller."""

    class Employee(User):
        class Meta:
            proxy = True
            app_label = "tests"

    assert principal_of(Employee(pk=42)) == principal_of(User(pk=42))


# What is asked for.


@pytest.mark.parametrize(
    ("route", "expected"),
    [("orders/<int:pk>/pay/", "POST /orders/<int:pk>/pay/"), ("", "POST /"), (None, "POST /x/")],
)
def test_operation_is_named_by_its_route(route: str | None, expected: str) -> None:
    """The route names the operation: it is the same for every order and survives a refactoring."""
    request = factory.post("/x/")
    request.resolver_match = ResolverMatch(lambda: None, (), {}, route=route)
    assert operation_name(request) == expected


def test_operation_without_a_route() -> None:
    """A request that was not resolved is named by its path."""
    assert operation_name(factory.delete("/x/")) == "DELETE /x/"


def test_key_header_is_a_setting() -> None:
    """The key is in the header that the project names, in any case."""
    request = a_post(headers={"idempotency-KEY": "k", "X-Request-Key": "x"})
    assert key_header(request) == "k"
    with override_settings(IDEMPOTENCY={"HEADER": "x-request-key"}):
        assert key_header(request) == "x"
    assert key_header(a_post()) is None


def multipart(boundary: str = "b", content: bytes = b"\x00\xff", **changes: Any) -> HttpRequest:
    """A request with two texts and a file."""
    file = SimpleUploadedFile(changes.pop("name", "a.png"), content, "image/png")
    method = changes.pop("method", "POST")
    data = encode_multipart(boundary, {"text": ["1", "2"], "note": "é", "photo": file, **changes})
    return factory.generic(method, "/orders/", data, f"multipart/form-data; boundary={boundary}")


METHODS = pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])


@METHODS
@pytest.mark.parametrize("change", [{"content": b"\x00\xfe"}, {"name": "b.png"}, {"note": "e"}])
def test_other_content_is_a_new_request(method: str, change: dict[str, Any]) -> None:
    """Another file, file name or text is another request."""
    assert body_of(multipart(method=method)) != body_of(multipart(method=method, **change))


# From a response to a payload and back.


@pytest.mark.parametrize("name", sorted(NEVER_STORED_HEADERS))
def test_never_kept(name: str) -> None:
    """Headers of one message, connection or session are not stored, in any case."""
    first = HttpResponse(b"a", "text/plain")
    first[name.title()] = "1"
    assert name not in replay(first)


# Problems.

CLASSES = [
    errors.KeyMissing,
    errors.KeyMalformed,
    errors.KeyGuessable,
    errors.OperationInProgress,
    errors.FingerprintMismatch,
    errors.ResponseNotStored,
    errors.StoreUnavailable,
    errors.ClaimLost,
]


@pytest.mark.parametrize("error_class", CLASSES)
def test_problem(error_class: type[errors.IdempotencyError]) -> None:
    """An error is a problem (RFC 9457) whose type is the address of its explanation."""
    response = problem_response(error_class("What was wrong: é."))
    assert response.status_code == error_class.status
    assert response["Content-Type"] == "application/problem+json"
    assert "Retry-After" not in response
    assert json.loads(response.content) == {
        "type": f"https://idempotency-django.readthedocs.io/problems/#{error_class.slug}",
        "title": error_class.title,
        "status": error_class.status,
        "detail": "What was wrong: é.",
        "code": error_class.slug,
        "state": error_class.state,
        "retryable": error_class.retryable,
        "safe_new_key": error_class.safe_new_key,
    }


@pytest.mark.parametrize("seconds", [0, 30])
def test_retry_after(seconds: int) -> None:
    """A problem that passes says when to come again."""
    response = problem_response(errors.OperationInProgress(retry_after=seconds))
    assert response["Retry-After"] == str(seconds)


@override_settings(
    IDEMPOTENCY={"STATUS_CODES": {"mismatch": 409}, "DOCS_URL": "https://docs.example.com/#"}
)
def test_status_codes_and_docs_are_settings() -> None:
    """A project chooses the status by the slug, and where problems are explained."""
    problem = error_body(errors.FingerprintMismatch())
    assert (problem["status"], problem["type"]) == (409, "https://docs.example.com/#mismatch")
    assert problem_response(errors.FingerprintMismatch()).status_code == 409
    assert status_of(errors.KeyMissing()) == 400


# A derived key.


class OnlyOnce(Adapter):
    """A view that returns 201."""

    def __init__(self, request: HttpRequest) -> None:
        self.http_request = self.request = request
        self.method = request.method or ""

    def respond(self) -> HttpResponseBase:
        return HttpResponse(b"done", "text/plain", status=201)

    def recover(self, error: Exception) -> HttpResponseBase:
        raise error


@given(st.text(VISIBLE_ASCII, min_size=1, max_size=255))
@example('a"b')
@example("a\\b")
def test_response_names_a_derived_key(key: str) -> None:
    """The response tells the client a key that, sent as it is, names the same operation.

    But for a comma, which no key in a header holds: two header lines could have been joined by it.
    """
    assume("," not in key)
    memory = {"default": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}}
    with override_settings(IDEMPOTENCY={"STORES": memory}):
        adapter = OnlyOnce(a_post())
        adapter.http_request.user = User(pk=42)
        response = serve(adapter, policy(key=lambda call: key))
    assert keys.parse_header(response["Idempotency-Key"]) == key
