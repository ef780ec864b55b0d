"""Bodies: a view with a key reads its request in every way in which it could without one."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, HttpResponse, JsonResponse, UnreadablePostError
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.test.client import encode_multipart
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.parsers import FileUploadParser, JSONParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.invocations import body_of
from idempotency_django.policy import fingerprints
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

PATH = "idempotency_django.middleware.IdempotencyMiddleware"
CONTENT = b"0123456789" * 40
FORM = "multipart/form-data; boundary=b"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hashing(FileUploadHandler):
    """An upload handler of the view's own: it keeps no file."""

    def __init__(self, request: Any = None) -> None:
        super().__init__(request)
        self.content = b""

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.content += raw_data

    def file_complete(self, file_size: int) -> None:
        return None


# The ways in which a view may read its body: each returns what it saw.


def by_body(request: Any) -> bytes:
    return bytes(request.body)


def by_read(request: Any) -> bytes:
    seen = b""
    while chunk := request.read(64):
        seen += chunk
    return seen


def by_lines(request: Any) -> bytes:
    return b"".join(request)


def by_wsgi_input(request: Any) -> bytes:
    length = int(request.META["CONTENT_LENGTH"])
    return bytes(request.META["wsgi.input"].read(length))


def by_files(request: Any) -> bytes:
    return bytes(request.FILES["file"].read())


def by_own_handler(request: Any) -> bytes:
    handler = Hashing()
    request.upload_handlers = [handler]
    assert request.POST["text"] == "t"
    return handler.content


def by_parser(request: Any) -> bytes:
    _, files = request.parse_file_upload(request.META, request)
    with files["file"] as file:
        return bytes(file.read())


RAW: list[Callable[[Any], bytes]] = [by_body, by_read, by_lines]
UPLOADED: list[Callable[[Any], bytes]] = [by_files, by_own_handler, by_parser]
BY_NAME = {way.__name__: way for way in (*RAW, *UPLOADED, by_wsgi_input)}


def by_nothing(request: Any) -> bytes:
    return b""


BY_NAME["by_nothing"] = by_nothing


def store(seen: bytes) -> dict[str, Any]:
    Effect.objects.create(reference="upload")
    return {"size": len(seen), "sha256": sha256(seen)}


def function(request: HttpRequest, way: str) -> HttpResponse:
    return JsonResponse(store(BY_NAME[way](request)), status=201)


async def coroutine(request: HttpRequest, way: str) -> HttpResponse:
    await Effect.objects.acreate(reference="upload")
    seen = BY_NAME[way](request)
    return JsonResponse({"size": len(seen), "sha256": sha256(seen)}, status=201)


class Protected(IdempotentViewMixin, APIView):
    def post(self, request: Request, way: str) -> Response:
        return Response(store(BY_NAME[way](request)), status=201)

    put = post


class OneFile(IdempotentViewMixin, APIView):
    parser_classes = [FileUploadParser]

    def post(self, request: Request) -> Response:
        with request.data["file"] as file:
            return Response(store(file.read()), status=201)


class NoParser(IdempotentViewMixin, APIView):
    parser_classes = [JSONParser]

    def post(self, request: Request) -> Response:
        return Response(store(request.read()), status=201)


class ByToken(BaseAuthentication):
    """Knows its caller by a token in the data."""

    def authenticate(self, request: Request) -> Any:
        return None if request.data["token"] == "t" else self.fail()

    def fail(self) -> Any:
        raise AuthenticationFailed


class Authenticated(IdempotentViewMixin, APIView):
    authentication_classes = [ByToken]

    def post(self, request: Request) -> Response:
        return Response(store(request.data["token"].encode()), status=201)


def consumed(view: Any) -> Any:
    """A decorator that takes the stream for itself."""

    def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        request.META["seen"] = request.read()
        return view(request, *args, **kwargs)

    return csrf_exempt(inner)


@idempotent
def of_the_first_bytes(request: HttpRequest) -> HttpResponse:
    return JsonResponse(store(request.META["seen"]), status=201)


@idempotent(fingerprint=fingerprints.without_body)
def without_body(request: HttpRequest) -> HttpResponse:
    return JsonResponse(store(request.META["seen"]), status=201)


urlpatterns = [
    path("decorated/<way>/", csrf_exempt(idempotent(function))),
    path("checked/<way>/", idempotent(function)),
    path("async/<way>/", csrf_exempt(idempotent(coroutine))),
    path("middleware/<way>/", csrf_exempt(function)),
    path("drf/<way>/", Protected.as_view()),
    path("file/", OneFile.as_view()),
    path("no-parser/", NoParser.as_view()),
    path("authenticated/", Authenticated.as_view()),
    path("consumed/", consumed(of_the_first_bytes)),
    path("without-body/", consumed(without_body)),
]


@pytest.fixture(autouse=True)
def _small_memory(settings: Any) -> None:
    """A form with CONTENT is read for its fingerprint, and its view gets a temporary file."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 300


@pytest.fixture
def client() -> Client:
    """A client that is checked for CSRF, as browsers are."""
    return Client(enforce_csrf_checks=True)


def effects() -> int:
    return Effect.objects.filter(reference="upload").count()


def form(content: bytes = CONTENT, boundary: str = "b", **fields: str) -> bytes:
    return encode_multipart(boundary, {"text": "t", "file": upload(content), **fields})


def upload(content: bytes) -> SimpleUploadedFile:
    return SimpleUploadedFile("a.bin", content, "application/octet-stream")


def send(client: Client, url: str, body: bytes, kind: str, key: str | None, **extra: Any) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    method = extra.pop("method", "POST")
    sent = client.generic(method, url, body, kind, headers={**headers, **extra.pop("headers", {})})
    return async_to_sync(awaited)(sent) if isinstance(client, AsyncClient) else sent


async def awaited(sent: Awaitable[Any]) -> Any:
    return await sent


def many_files() -> bytes:
    """A form with more files than Django takes."""
    return encode_multipart("b", {"file": [upload(b"x") for _ in range(101)]})


WAYS_TO_PROTECT = ["decorated", "middleware"]


class TestPlainViews:
    """Views of Django."""

    @pytest.fixture(autouse=True)
    def _middleware(self, settings: Any) -> None:
        settings.MIDDLEWARE = [*django_settings.MIDDLEWARE, PATH]

    @pytest.mark.parametrize("way", ["by_read", "by_lines", "by_wsgi_input"])
    @pytest.mark.parametrize("size", [10, 400])
    @pytest.mark.parametrize("how", WAYS_TO_PROTECT)
    def test_streamed(self, client: Client, how: str, way: str, size: int) -> None:
        """A view that streams gets all of the body, whether or not it fits in memory."""
        key, body = new_key(), CONTENT[:size]
        first = send(client, f"/{how}/{way}/", body, "application/octet-stream", key)
        assert first.json() == {"size": size, "sha256": sha256(body)}
        second = send(client, f"/{how}/{way}/", body, "application/octet-stream", key)
        assert_replays(first, second)
        other = send(client, f"/{how}/{way}/", body[:-1] + b"x", "application/octet-stream", key)
        assert_problem(other, 422, "mismatch")
        assert effects() == 1

    @pytest.mark.parametrize("way", RAW, ids=lambda way: way.__name__)
    @pytest.mark.parametrize("how", WAYS_TO_PROTECT)
    def test_form_as_bytes(self, client: Client, how: str, way: Any, settings: Any) -> None:
        """A view may take a form's bytes: they are not parsed away before."""
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10_000
        key, body = new_key(), form()
        first = send(client, f"/{how}/{way.__name__}/", body, FORM, key)
        assert first.json() == {"size": len(body), "sha256": sha256(body)}
        again = form(boundary="c")
        second = send(client, f"/{how}/{way.__name__}/", again, FORM[:-1] + "c", key)
        assert_replays(first, second)
        assert effects() == 1

    def test_form_that_csrf_has_parsed(self, client: Client) -> None:
        """The CSRF middleware reads a form before every view; the fingerprint uses its parts."""
        client.cookies["csrftoken"] = token = "a" * 32
        url, key = "/checked/by_files/", new_key()
        responses = []
        for content in (CONTENT, CONTENT, b"x" * 400):
            data = {"text": "t", "csrfmiddlewaretoken": token, "file": upload(content)}
            responses.append(client.post(url, data, headers={"Idempotency-Key": key}))
        assert responses[0].json() == {"size": 400, "sha256": sha256(CONTENT)}
        assert_replays(responses[0], responses[1])
        assert_problem(responses[2], 422, "mismatch")
        assert effects() == 1

    @pytest.mark.parametrize("way", ["by_files", "by_nothing"])
    @pytest.mark.parametrize("how", [*WAYS_TO_PROTECT, "async"])
    def test_refused_after_a_file(self, client: Client, settings: Any, how: str, way: str) -> None:
        """With a key, and at a retry, a form that Django refuses gets the response it gets without
        one; so does a view that never looks at it.
        """
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100_000
        client.raise_request_exception = False
        key, body = new_key(), many_files()
        sent = [send(client, f"/{how}/{way}/", body, FORM, each) for each in (None, key, key)]
        assert {each.status_code for each in sent} == {201 if way == "by_nothing" else 400}
        if way == "by_nothing":
            assert effects() == 2  # the last one is a replay
        else:
            assert effects() == 0 or how == "async"  # whose effects no transaction holds


@pytest.mark.parametrize(
    ("how", "way", "method"),
    [
        *((how, way, "POST") for how in WAYS_TO_PROTECT for way in ("by_files", "by_own_handler")),
        *((how, "by_parser", "PUT") for how in WAYS_TO_PROTECT),  # Django parses no form of a PUT
        *(("async", way.__name__, "POST") for way in UPLOADED),
        *(("drf", way, "POST") for way in ("by_files", "by_own_handler")),
    ],
)
def test_upload(client: Any, settings: Any, how: str, way: str, method: str) -> None:
    """Files arrive whole, by Django's way or by upload handlers of the view's own."""
    settings.MIDDLEWARE = [*django_settings.MIDDLEWARE, PATH]
    client = AsyncClient() if how == "async" else client
    key, url = new_key(), f"/{how}/{way}/"
    first = send(client, url, form(), FORM, key, method=method)
    assert first.json() == {"size": 400, "sha256": sha256(CONTENT)}
    second = send(client, url, form(boundary="c"), FORM[:-1] + "c", key, method=method)
    assert_replays(first, second)
    other = send(client, url, form(CONTENT[:-1] + b"x"), FORM, key, method=method)
    assert_problem(other, 422, "mismatch")
    assert effects() == 1


class TestRestFramework:
    """Views of REST framework."""

    @pytest.mark.parametrize("size", [10, 400])
    @pytest.mark.parametrize("url", ["/file/", "/no-parser/"])
    def test_raw_upload(self, client: Client, url: str, size: int) -> None:
        """A raw body arrives whole: by its parser, or without a parser for it."""
        key, body = new_key(), CONTENT[:size]
        named = {"Content-Disposition": "attachment; filename=a.bin"}
        kind = "application/octet-stream"
        first = send(client, url, body, kind, key, headers=named)
        assert first.json() == {"size": size, "sha256": sha256(body)}
        assert_replays(first, send(client, url, body, kind, key, headers=named))
        other = body[:-1] + b"x"
        assert_problem(send(client, url, other, kind, key, headers=named), 422, "mismatch")
        assert effects() == 1

    @pytest.mark.parametrize(
        ("kind", "body", "again", "other"),
        [
            (
                "application/json",
                b'{"token": "t", "amount": 1}',
                b'{"amount": 1, "token": "t"}',
                b'{"token": "t", "amount": 2}',
            ),
            (
                "application/x-www-form-urlencoded",
                b"token=t&amount=1",
                b"amount=1&token=t",
                b"token=t&amount=2",
            ),
            (FORM, form(token="t"), form(token="t"), form(token="t", text="u")),
            (FORM, form(token="t"), form(token="t"), form(CONTENT[:-1] + b"x", token="t")),
        ],
        ids=["json", "form", "field", "file"],
    )
    def test_data_that_an_authentication_has_read(
        self, client: Client, kind: str, body: bytes, again: bytes, other: bytes
    ) -> None:
        """Data that was parsed before the look-up is compared by its fields and files."""
        key, url = new_key(), "/authenticated/"
        first = send(client, url, body, kind, key)
        assert first.status_code == 201
        assert_replays(first, send(client, url, again, kind, key))
        assert_problem(send(client, url, other, kind, key), 422, "mismatch")
        assert effects() == 1


def by_chunks(request: Any) -> bytes:
    return bytes(request.META["wsgi.input"].read())


BY_NAME["by_chunks"] = by_chunks


class Terminated(BytesIO):
    """The input of a server that ends it where the last chunk ends; it cannot be read twice."""

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("url", ["/decorated/by_chunks/", "/drf/by_chunks/"])
@pytest.mark.parametrize("size", [10, 400])
def test_chunked_body(url: str, size: int) -> None:
    """A body without a length, which Django ignores under WSGI, is left to the view."""
    key, body = new_key(), CONTENT[:size]

    def chunked(content: bytes) -> Any:
        environ: dict[str, Any] = {
            "CONTENT_TYPE": "application/octet-stream",
            "HTTP_TRANSFER_ENCODING": "chunked",
            "wsgi.input": Terminated(content),
            "wsgi.input_terminated": True,
        }
        return Client().generic("POST", url, headers={"Idempotency-Key": key}, **environ)

    first = chunked(body)
    assert first.json() == {"size": size, "sha256": sha256(body)}
    assert_replays(first, chunked(body))
    assert effects() == 1


@pytest.mark.parametrize("url", ["/decorated/by_read/", "/drf/by_read/"])
@pytest.mark.parametrize("kind", ["application/octet-stream", FORM])
def test_client_that_breaks_off(url: str, kind: str) -> None:
    """Half of a body is not executed: the retry, which sends all of it, is not refused."""
    key, whole = new_key(), (form() if kind is FORM else CONTENT)

    def upload_of(content: bytes) -> Any:
        environ: dict[str, Any] = {
            "CONTENT_TYPE": kind,
            "CONTENT_LENGTH": str(len(whole)),
            "wsgi.input": Terminated(content),
        }
        return Client().generic("POST", url, headers={"Idempotency-Key": key}, **environ)

    for half in (b"", whole[: len(whole) // 2]):
        with pytest.raises(UnreadablePostError, match="The client has closed the connection"):
            upload_of(half)
        assert effects() == 0
    assert upload_of(whole).json() == {"size": len(whole), "sha256": sha256(whole)}
    assert effects() == 1


class TestTooLarge:
    """A body of more than ``DATA_UPLOAD_MAX_MEMORY_SIZE``, which is not read."""

    @pytest.fixture(autouse=True)
    def _limit(self, settings: Any) -> None:
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 399

    @pytest.mark.parametrize("url", ["/decorated/by_read/", "/drf/by_read/", "/no-parser/"])
    @pytest.mark.parametrize("kind", ["application/octet-stream", "application/json", FORM])
    def test_left_to_the_view(self, client: Client, url: str, kind: str) -> None:
        """The view gets all of it. Only the key, and the rest of the request, tell a retry."""
        key = new_key()
        first = send(client, url, CONTENT, kind, key)
        assert first.json() == {"size": 400, "sha256": sha256(CONTENT)}
        second = send(client, url, b"x" * 400, kind, key)
        assert_replays(first, second)
        assert not second.wsgi_request._read_started
        assert_problem(send(client, f"{url}?a=1", CONTENT, kind, key), 422, "mismatch")
        assert effects() == 1

    @pytest.mark.parametrize("url", ["/decorated/by_read/", "/drf/by_read/"])
    def test_digest(self, client: Client, url: str) -> None:
        """The client's digest of it is part of the fingerprint."""
        key, kind = new_key(), "application/octet-stream"
        first, second, other = (
            send(client, url, CONTENT, kind, key, headers={"Content-Digest": f"sha-256=:{each}:"})
            for each in ("YQ==", "YQ==", "Yg==")
        )
        assert_replays(first, second)
        assert_problem(other, 422, "mismatch")
        assert effects() == 1


def test_json_that_calls_itself_a_form() -> None:
    """As of ``curl -d``: what a form would leave out makes a difference."""
    sent = ('{"amount": "+49"}', '{"amount": " 49"}')
    encoded = "application/x-www-form-urlencoded"
    read = [body_of(RequestFactory().post("/", each, content_type=encoded)) for each in sent]
    assert read == [each.encode() for each in sent]


def test_no_body_of_an_async_test_client() -> None:
    """Whose stream cannot seek."""
    assert body_of(AsyncRequestFactory().generic("POST", "/")) == b""


class TestRefused:
    """What nobody can compare with a retry."""

    @pytest.mark.parametrize("kind", ["application/octet-stream", FORM])
    def test_stream_that_was_read_before(self, client: Client, kind: str) -> None:
        """A body that was read before the look-up is an error that says so and what to do."""
        with pytest.raises(ImproperlyConfigured, match="was read as a stream") as caught:
            send(client, "/consumed/", form(), kind, new_key())
        assert "fingerprints.without_body" in str(caught.value)
        assert effects() == 0

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_form_that_was_parsed_before(self, method: str) -> None:
        """A form that other code has parsed for itself is not taken for an empty one."""
        request = RequestFactory().generic(method, "/", form(), FORM)
        _, files = request.parse_file_upload(request.META, request)
        for file in files.values():
            file.close()
        with pytest.raises(ImproperlyConfigured, match="was read as a stream"):
            body_of(request)

    def test_without_the_body(self, client: Client) -> None:
        """The way out: the body is left alone, and its digest counts where the client sends one."""
        key, kind = new_key(), "application/octet-stream"
        first, second, other = (
            send(client, "/without-body/", CONTENT, kind, key, headers={"Content-Digest": digest})
            for digest in ("sha-256=:YQ==:", "sha-256=:YQ==:", "sha-256=:Yg==:")
        )
        assert first.json() == {"size": 400, "sha256": sha256(CONTENT)}
        assert_replays(first, second)
        assert_problem(other, 422, "mismatch")
        assert effects() == 1
