"""The HTTP codec: requests to calls, responses to payloads and back, errors to problems."""

from __future__ import annotations

import gzip
import json
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import (
    FileResponse,
    HttpRequest,
    HttpResponse,
    StreamingHttpResponse,
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
from idempotency_django.http.adapters import Adapter
from idempotency_django.http.bodies import body_of
from idempotency_django.http.invocations import (
    invocation_of,
    key_header,
    operation_name,
    principal_of,
)
from idempotency_django.http.problems import error_body, problem_response, status_of
from idempotency_django.http.responses import NEVER_STORED_HEADERS, payload_of, response_of
from idempotency_django.http.serving import serve
from idempotency_django.policy import DEFAULTS, Policy, keys
from idempotency_django.policy.digests import digest
from idempotency_django.policy.invocation import Form
from idempotency_django.stores.records import Payload
from tests.support.properties import VISIBLE_ASCII

factory = RequestFactory()

TOKENS = st.text("abcdefgHIJKLM-0123", min_size=1, max_size=12).map("X-{}".format)
VALUES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40)
HEADERS = st.lists(st.tuples(TOKENS, VALUES), max_size=5)


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


def test_user_that_cannot_be_told_apart() -> None:
    """Users without a primary key would share one name: the project must say what to do."""
    with pytest.raises(ImproperlyConfigured, match=r"user of this request, Person.* principal="):
        principal_of(Person(None))


@pytest.mark.parametrize("claims", [{"sub": 17}, {"a set"}, 17, True])
def test_claims_name_nobody(claims: object) -> None:
    """What authenticated the request and has no primary key leaves it to the credentials."""
    assert principal_of(None, claims) == ""


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


def test_invocation_of_a_request() -> None:
    """What the policy is told of a request."""
    request = a_post(
        b'{"a": 1}', "Application/JSON; charset=utf-8", headers={"Idempotency-Key": "k"}
    )
    request.user = User(pk=42)
    call = invocation_of(request)
    assert (call.name, call.method, call.path) == ("POST /orders/", "POST", "/orders/")
    assert (call.query, call.media_type, call.body) == ("a=1", "application/json", b'{"a": 1}')
    assert (call.principal, call.request) == ("user:42", request)


def test_invocation_of_a_bare_request() -> None:
    """A request without user, body, type, query and key has a call too."""
    request = factory.get("/")
    request.method = request.content_type = None
    call = invocation_of(request)
    assert (call.principal, call.method, call.query, call.media_type) == ("", "", "", "")
    assert call.body == b""


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
def test_multipart_by_field_and_file(method: str) -> None:
    """A form is known by its fields, in the order of their values, and by its files' content."""
    body = body_of(multipart(method=method))
    assert isinstance(body, Form)
    assert body.fields == {"text": ["1", "2"], "note": ["é"]}
    (file,) = body.files
    assert (file.field, file.name, file.media_type, file.size) == ("photo", "a.png", "image/png", 2)
    assert len(file.sha256) == 64


@METHODS
def test_new_boundary_is_no_new_request(method: str) -> None:
    """An HTTP client makes a boundary of its own for each attempt."""
    one, other = (multipart(boundary, method=method) for boundary in ("b", "another"))
    assert body_of(one) == body_of(other)


@METHODS
@pytest.mark.parametrize("change", [{"content": b"\x00\xfe"}, {"name": "b.png"}, {"note": "e"}])
def test_other_content_is_a_new_request(method: str, change: dict[str, Any]) -> None:
    """Another file, file name or text is another request."""
    assert body_of(multipart(method=method)) != body_of(multipart(method=method, **change))


@METHODS
def test_view_still_has_its_files(method: str) -> None:
    """What was read for the fingerprint can be read again."""
    request = multipart(method=method)
    body_of(request)
    if method != "POST":
        _, files = request.parse_file_upload(request.META, BytesIO(request.body))
    else:
        files = request.FILES
    assert files["photo"].read() == b"\x00\xff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_form_by_field(method: str) -> None:
    """An urlencoded form is known by its fields, with every method, empty ones included."""
    kind = "application/x-www-form-urlencoded"
    one = body_of(factory.generic(method, "/", b"b=2&a=1&a=%C3%A9&c=", kind))
    other = body_of(factory.generic(method, "/", b"a=1&c=&b=2&a=%c3%a9", f"{kind}; charset=utf-8"))
    assert one == other == Form({"a": ["1", "é"], "b": ["2"], "c": [""]})


def test_form_is_still_there_for_the_view() -> None:
    """The view reads the form, or the bytes, as if nobody had done so before."""
    request = a_post(b"a=1", "application/x-www-form-urlencoded")
    body_of(request)
    assert request.POST["a"] == "1"
    assert request.body == b"a=1"


@pytest.mark.parametrize("other", [b"a=1&a=1", b"a=2", b"b=1", b"a=1&b=", b"a=", b""])
def test_other_form(other: bytes) -> None:
    """Another value, another field, or a value more is another request."""
    kind = "application/x-www-form-urlencoded"
    assert body_of(a_post(b"a=1", kind)) != body_of(a_post(other, kind))


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream", ""])
def test_anything_else_byte_for_byte(kind: str) -> None:
    """Any other body is known by its bytes."""
    assert body_of(a_post(b"\x00a=1", kind)) == b"\x00a=1"


# From a response to a payload and back.


@given(
    st.integers(100, 599),
    st.binary(),
    HEADERS,
    st.sampled_from(["application/json", "text/plain", "x/é"]),
)
@example(200, b"", [], "")
@example(204, b"", [], "")
@example(304, b"", [("ETag", '"1"')], "")
@example(
    201, gzip.compress(b"a"), [("Content-Encoding", "gzip"), ("Vary", "a, b")], "application/json"
)
@example(
    201, b"{}", [("Location", "/o/1/"), ("Link", "<a>; rel=x, <b>; rel=y")], "application/json"
)
@example(200, b"\x00\xff", [("Content-Disposition", "attachment; filename=\xe9")], "text/plain")
def test_response_survives(
    status: int, body: bytes, headers: list[tuple[str, str]], content_type: str
) -> None:
    """A replay has the status, the bytes and the headers of the first response."""
    first = HttpResponse(body, status=status, content_type=content_type or None)
    for name, value in headers:
        first[name] = value
    again = replay(first)
    assert (again.status_code, again.content) == (status, body)
    assert list(again.items()) == list(first.items())


def test_no_content_type_stays_none() -> None:
    """A response that had no Content-Type gets none in its replay."""
    first = HttpResponse(b"", status=204)
    del first["Content-Type"]
    assert "Content-Type" not in replay(first)


@pytest.mark.parametrize("name", sorted(NEVER_STORED_HEADERS))
def test_never_kept(name: str) -> None:
    """Headers of one message, connection or session are not stored, in any case."""
    first = HttpResponse(b"a", "text/plain")
    first[name.title()] = "1"
    assert name not in replay(first)


def test_cookies_are_never_kept() -> None:
    """The session of the one who asked first is not given to whoever asks again."""
    first = HttpResponse(b"a", "text/plain")
    first.set_cookie("sessionid", "secret")
    first["Set-Cookie"] = "sessionid=secret"
    payload = payload_of(first, DEFAULTS)
    assert "secret" not in repr(payload)
    assert not response_of(payload).cookies


def test_headers_that_the_project_excludes(settings: Any) -> None:
    """A project may name more headers, in any case."""
    first = HttpResponse(headers={"X-Cost": "1", "X-Kept": "2"})
    settings.IDEMPOTENCY = {"EXCLUDE_HEADERS": ["x-COST"]}
    again = replay(first)
    assert "X-Cost" not in again
    assert again["X-Kept"] == "2"


@pytest.mark.parametrize(
    "streamed",
    [
        StreamingHttpResponse(iter([b"a"])),
        FileResponse(BytesIO(b"a"), as_attachment=True, filename="a.csv"),
    ],
)
def test_streamed_response_leaves_a_tombstone(streamed: StreamingHttpResponse) -> None:
    """A streamed response is not kept, and not read either: the client still gets it."""
    assert payload_of(streamed, DEFAULTS).body is None
    assert streamed.getvalue() == b"a"


@pytest.mark.parametrize(
    ("size", "limit", "kept"),
    [(10, 10, True), (11, 10, False), (0, 0, True), (1, 0, False)],
)
def test_oversized_response_leaves_a_tombstone(size: int, limit: int, kept: bool) -> None:
    """A response of up to max_response_bytes is kept; of a larger one, that there was one."""
    body = b"a" * size
    payload = payload_of(
        HttpResponse(body, "text/plain", status=201), policy(max_response_bytes=limit)
    )
    assert payload.status == 201
    assert payload.body == (body if kept else None)


def test_empty_body_is_no_tombstone() -> None:
    """No bytes are a response."""
    assert payload_of(HttpResponse(b"", status=204), DEFAULTS).body == b""


def test_body_that_is_not_to_be_stored() -> None:
    """With max_response_bytes=0 status and headers are kept."""
    payload = payload_of(
        HttpResponse("x", "text/plain", headers={"Location": "/o/1/"}), policy(max_response_bytes=0)
    )
    assert payload.body is None
    assert dict(payload.headers)["Location"] == "/o/1/"


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
    """An error is a problem (RFC 9457) whose type is the page that explains it."""
    response = problem_response(error_class("What was wrong: é."))
    assert response.status_code == error_class.status
    assert response["Content-Type"] == "application/problem+json"
    assert "Retry-After" not in response
    assert json.loads(response.content) == {
        "type": f"https://idempotency-django.readthedocs.io/problems/{error_class.slug}",
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


def test_payload_is_plain() -> None:
    """What stores keep is made of numbers, texts and bytes."""
    payload = payload_of(HttpResponse(b"a", "text/plain", headers={"Location": "/"}), DEFAULTS)
    assert payload == Payload(200, (("Location", "/"), ("Content-Type", "text/plain")), b"a")
