"""The failures that published libraries ship, one by one, and what the standard asks for.

Each class is a library or a section, each test one failure. Where a failure has its own tests
elsewhere (races over real processes, stores, bodies), the shortest proof of it stands here.
"""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.http import HttpResponse, HttpResponseRedirect
from django.test import Client
from django.test.client import encode_multipart
from django.urls import path
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

import idempotency_django
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import DEFAULTS, Policy
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support.shared import (
    assert_guessable,
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class View(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> HttpResponse:
        reference = request.data.get("reference", "form")
        Effect.objects.create(reference=reference)
        match reference:
            case "binary":
                return HttpResponse(b"\x89PNG\r\n\x1a\n\0\xff", content_type="image/png")
            case "object":
                return Response({})
            case "redirect":
                return HttpResponseRedirect("/there/")
            case "cookie":
                response = Response({})
                response.set_cookie("s", "1")
                return response
            case "503":
                return Response(status=503)
            case "error":
                raise LookupError
        return Response({"reference": reference}, status=201)


class Longer(View):
    idempotency_policy = Policy(on_conflict="wait")


@api_view(["POST"])
@idempotent
def decorated(request: Request) -> Response:
    Effect.objects.create(reference=request.data["reference"])
    return Response({"reference": request.data["reference"]}, status=201)


urlpatterns = [
    path("v/", View.as_view()),
    path("waits/", Longer.as_view()),
    path("decorated/", decorated),
]


def duplicates(url: str, count: int = 10) -> list[HttpResponse]:
    """Simultaneous requests with one key."""
    key = new_key()
    return in_threads([lambda: post(Client(), url, key)] * count)


class TestDjangoIdempotencyKey:
    """django-idempotency-key 1.3.0."""

    def test_concurrent_duplicates(self) -> None:
        """10 concurrent duplicates, 10 effects; here 1, and the others are told or replayed."""
        responses = duplicates("/v/")
        assert effects() == 1
        assert {response.status_code for response in responses} <= {201, 409}
        assert (
            sum(response.status_code == 201 and not is_replay(response) for response in responses)
            == 1
        )
        assert len({response.content for response in responses if response.status_code == 201}) == 1

    def test_concurrent_duplicates_that_wait(self) -> None:
        """With ``on_conflict="wait"`` each of them gets the response."""
        responses = duplicates("/waits/")
        assert effects() == 1
        assert [response.status_code for response in responses] == [201] * 10
        assert sum(not is_replay(response) for response in responses) == 1

    def test_one_global_lock(self, client: Client) -> None:
        """One lock for all keys; here different keys do not know of one another."""
        responses = in_threads([lambda: post(Client(), "/v/", new_key())] * 8)
        if connection.vendor == "sqlite":
            assert {response.status_code for response in responses} <= {201, 409}
        else:
            assert [response.status_code for response in responses] == [201] * 8

    def test_pickle(self) -> None:
        """Responses as pickles; here nothing imports pickle, and the bytes are the bytes."""
        folder = Path(idempotency_django.__file__).parent
        imported = {
            alias.name
            for file in folder.rglob("*.py")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert imported
        assert not imported & {"pickle", "dill", "marshal", "shelve"}
        key = new_key()
        first = post(Client(), "/v/", key)
        assert bytes(record(key).response_body or b"") == first.content


class TestDRFIdempotency:
    """drf-idempotency 1.0.0."""

    def test_decorator_renders_too_early(self, client: Client) -> None:
        """The decorator rendered before DRF had chosen a renderer: a 500 after the effect."""
        key = new_key()
        first = post(client, "/decorated/", key)
        assert first.status_code == 201
        assert_replays(first, post(client, "/decorated/", key))
        assert effects() == 1


class TestDjangoRESTFrameworkIdempotencyKey:
    """djangorestframework-idempotency-key 1.0.3."""

    def test_honest_retry_is_refused(self, client: Client) -> None:
        """The fingerprint came back as a memoryview under psycopg2; here it is text, everywhere."""
        key = new_key()
        assert_replays(post(client, "/v/", key), post(client, "/v/", key))
        assert isinstance(record(key).fingerprint, str)

    @pytest.mark.parametrize("key", ["not-a-uuid-but-long-enough", "01ARZ3NDEKTSV4RRFFQ69G5FAV"])
    def test_key_that_is_no_uuid(self, client: Client, key: str) -> None:
        """A key that is no UUID gave a 500; here keys are text."""
        assert_replays(post(client, "/v/", key), post(client, "/v/", key))


class TestDRFIdempotencyKey:
    """drf-idempotencykey 0.2.0. Its replay before ``initial()`` has its tests in test_drf.py."""

    def test_unhandled_exception_wedges_the_key(self, client: Client) -> None:
        """The key was wedged for 60 minutes; here the retry runs at once."""
        key = new_key()
        with pytest.raises(LookupError):
            post(client, "/v/", key, "error")
        assert post(client, "/v/", key, "a").status_code == 201

    def test_binary_body_replays_empty(self, client: Client) -> None:
        """A binary body replayed empty; here byte for byte."""
        key = new_key()
        first = post(client, "/v/", key, "binary")
        assert_replays(first, post(client, "/v/", key, "binary"))


class TestDRFIdem:
    """drf-idem 0.1.1."""

    def test_runs_and_then_looks(self, client: Client) -> None:
        """It ran the view and then looked; here a refused request has run nothing."""
        key = new_key()
        post(client, "/v/", key)
        post(client, "/v/", key, "b")
        assert effects("b") == 0


class TestASGIIdempotencyHeader:
    """asgi-idempotency-header 0.2.0."""

    def test_conflict_for_ever(self, client: Client) -> None:
        """409 for ever after the response expired; here an expired key is free."""
        from idempotency_django.models import DatabaseNow

        key = new_key()
        post(client, "/v/", key)
        type(record(key)).objects.update(expires_at=DatabaseNow())
        assert not is_replay(post(client, "/v/", key))
        assert effects() == 2
        assert record(key).attempt == 2

    def test_location_is_lost(self, client: Client) -> None:
        """``Location`` was lost; here all headers of the response stay."""
        key = new_key()
        first = post(client, "/v/", key, "redirect")
        again = post(client, "/v/", key, "redirect")
        assert_replays(first, again)
        assert again["Location"] == "/there/"


class TestPowertools:
    """AWS Lambda Powertools 3.37. Its late owner has its test in the store contract."""

    def test_update_drops_the_hash(self, client: Client) -> None:
        """Completion dropped the payload's hash; here the identical retry is no mismatch."""
        key = new_key()
        post(client, "/v/", key)
        fingerprint = record(key).fingerprint
        assert is_replay(post(client, "/v/", key))
        assert is_replay(post(client, "/v/", key))
        assert record(key).fingerprint == fingerprint

    def test_empty_object(self, client: Client) -> None:
        """``{}`` replayed as nothing; here as ``{}``."""
        key = new_key()
        first = post(client, "/v/", key, "object")
        assert first.content == b"{}"
        assert_replays(first, post(client, "/v/", key, "object"))


class TestVarious:
    """Seen in several."""

    def test_5xx_is_replayed(self, client: Client) -> None:
        """A 503 was replayed for a day; here the retry runs."""
        key = new_key()
        for attempt in (1, 2):
            assert not is_replay(post(client, "/v/", key, "503"))
            assert record(key).attempt == attempt

    def test_session_advisory_locks(self) -> None:
        """Session locks are lost or leaked behind PgBouncer; here they end with the transaction."""
        sql = files("idempotency_django.stores.database.dialects") / "postgresql.py"
        locks = set(re.findall(r"pg_\w*advisory\w*", sql.read_text()))
        assert locks == {"pg_try_advisory_xact_lock"}

    def test_lost_insert_race(self) -> None:
        """The loser of an insert race got a 500."""
        for _ in range(5):
            assert all(response.status_code < 500 for response in duplicates("/v/", 4))
        assert effects() == 5

    def test_header_split_at_commas(self, client: Client) -> None:
        """A comma joins two header lines, and nobody can tell, quoted or not: it is refused."""
        key = f"{new_key()},{new_key()}"
        assert_problem(post(client, "/v/", key), 400, "key-malformed")
        response = post(client, "/v/", headers={"Idempotency-Key": key})
        assert_problem(response, 400, "key-malformed")

    def test_set_cookie_is_replayed(self, client: Client) -> None:
        """A cookie set for one session was handed out to another."""
        key = new_key()
        assert post(Client(), "/v/", key, "cookie").cookies
        assert not post(Client(), "/v/", key, "cookie").cookies

    def test_fresh_boundary(self, client: Client) -> None:
        """A retry with a new multipart boundary counted as a new request."""
        key = new_key()

        def send(boundary: str) -> HttpResponse:
            file = SimpleUploadedFile("f", b"data")
            return client.post(
                "/v/",
                encode_multipart(boundary, {"reference": "form", "file": file}),
                content_type=f"multipart/form-data; boundary={boundary}",
                headers={"Idempotency-Key": key},
            )

        assert_replays(send("one"), send("two"))
        assert effects("form") == 1

    def test_shared_anonymous_bucket(self, client: Client) -> None:
        """Anonymous callers share a scope, so their keys must be unguessable."""
        assert_guessable(post(client, "/v/", "1"))


class TestStandard:
    """draft-ietf-httpapi-idempotency-key-header-07, by section."""

    def test_parameters_may_follow(self, client: Client) -> None:
        """2.1: an Item may have parameters; they are no part of the key."""
        key = new_key()
        first = post(client, "/v/", key)
        assert_replays(first, post(client, "/v/", headers={"Idempotency-Key": f'"{key}";v=1'}))

    def test_escapes(self, client: Client) -> None:
        """2.1: an escaped quotation mark or backslash is one character of the key."""
        sent = f'"{new_key()}\\"\\\\"'
        response = post(client, "/v/", headers={"Idempotency-Key": sent})
        assert_guessable(response)  # parsed, and then no URL-safe key

    def test_expiry_policy(self) -> None:
        """2.3: there is an expiry policy, and it is not the lease of anything."""
        assert DEFAULTS.ttl is not None

    def test_key_where_it_means_nothing(self, client: Client) -> None:
        """A client may send a key anywhere."""
        assert client.get("/nowhere/", headers={"Idempotency-Key": "a,b"}).status_code == 404
        assert client.options("/v/", headers={"Idempotency-Key": "a,b"}).status_code == 200
