"""Every dialect of HTTP, over every way to protect a view: one contract for all of them.

``SPOKEN`` has a row for each dialect: how its clients send a key, and what they get back.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from io import BytesIO
from typing import Any, ClassVar
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client, override_settings
from django.urls import path
from django.utils.http import http_date
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from jsonschema import Draft7Validator
from rest_framework import serializers
from rest_framework.authentication import SessionAuthentication
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import JSONParser, MultiPartParser
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import (
    DeadLettered,
    IdempotencyError,
    KeyGuessable,
    StoreUnavailable,
    all_errors,
)
from idempotency_django.http.messages import error_body, status_of
from idempotency_django.policy import DEFAULTS, PROJECT_POLICY, Policy, identity, keys, resolve
from idempotency_django.policy.dialects import (
    ACP,
    DIALECTS,
    OASIS,
    STRIPE,
    STRIPE_V2,
    Dialect,
)
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support import LONG_AGO, effects, is_replay, logged_in, new_key, record
from tests.ways import MIDDLEWARE

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]

NOW = datetime.now(UTC)


def uuid7(made: datetime = NOW) -> str:
    """A UUIDv7 that was made then (RFC 9562)."""
    milliseconds = int(made.timestamp() * 1000)
    number = (milliseconds << 80) | (uuid.uuid4().int & ((1 << 80) - 1))
    number = number & ~(0xF << 76) | 7 << 76
    return str(uuid.UUID(int=number & ~(0b11 << 62) | 0b10 << 62))


# How clients of a dialect send a key, and what they get back.


def in_header(name: str = "Idempotency-Key") -> Callable[[str], dict[str, Any]]:
    return lambda key: {"headers": {name: key}}


def in_repeatability(key: str) -> dict[str, Any]:
    sent = http_date(NOW.timestamp())
    return {
        "headers": {"Repeatability-Request-ID": key, "Repeatability-First-Sent": sent},
    }


def in_member(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda key: {"body": {name: key}}


def problem_type(response: HttpResponse) -> str:
    return str(json.loads(response.content)["type"]).rpartition("/")[2]


def member(*path: str | int) -> Callable[[HttpResponse], Any]:
    """What a JSON body has there."""

    def read(response: HttpResponse) -> Any:
        value = json.loads(response.content)
        for each in path:
            value = value[each]
        return value

    return read


def xml_code(response: HttpResponse) -> Any:
    return ElementTree.fromstring(response.content).findtext("Errors/Error/Code")


@dataclass
class Spoken:
    """What clients of a dialect see.

    Attributes:
        dialect: its name.
        send: the headers and members of the body that carry a key.
        read: reads from an error what tells it from others.
        mismatch: the status and that of a key that was used for another request.
        in_progress: likewise, while the first request runs.
        malformed: likewise, for a key that is too long.
        missing: likewise, for no key; ``None``: it is optional.
        media_type: of an error.
        make: makes a key.
        form: whether the body is a form.
        marker: the header of a replay.
        always: the headers of each response, by the key.
        refused: the headers of a mismatch, by the key.
    """

    dialect: str
    send: Callable[[str], dict[str, Any]]
    read: Callable[[HttpResponse], Any]
    mismatch: tuple[int, Any]
    in_progress: tuple[int, Any]
    malformed: tuple[int, Any]
    missing: tuple[int, Any] | None = None
    media_type: str = "application/json"
    make: Callable[[], str] = new_key
    form: bool = False
    marker: str = ""
    always: Callable[[str], dict[str, str]] = field(default=lambda key: {})
    refused: Callable[[str], dict[str, str]] = field(default=lambda key: {})


STRIPE_ERRORS: dict[str, Any] = {
    "send": in_header(),
    "read": member("error", "type"),
    "mismatch": (400, "idempotency_error"),
    "in_progress": (409, "idempotency_error"),
    "malformed": (400, "idempotency_error"),
    "marker": "Idempotent-Replayed",
    "refused": lambda key: {"Stripe-Should-Retry": "false"},
}
GOOGLE_ERRORS: dict[str, Any] = {
    "read": member("error", "status"),
    "mismatch": (400, "INVALID_ARGUMENT"),
    "in_progress": (409, "ABORTED"),
    "malformed": (400, "INVALID_ARGUMENT"),
}
SPOKEN = [
    Spoken(
        "ietf",
        in_header(),
        problem_type,
        mismatch=(422, "mismatch"),
        in_progress=(409, "in-progress"),
        malformed=(400, "key-malformed"),
        media_type="application/problem+json",
        marker="Idempotent-Replayed",
    ),
    Spoken("stripe", **STRIPE_ERRORS),
    Spoken("stripe-v2", **STRIPE_ERRORS),
    Spoken(
        "acp",
        in_header(),
        member("code"),
        mismatch=(422, "idempotency_conflict"),
        in_progress=(409, "idempotency_in_flight"),
        malformed=(400, "key_malformed"),
        missing=(400, "idempotency_key_required"),
        marker="Idempotent-Replayed",
        always=lambda key: {"Idempotency-Key": key},
        refused=lambda key: {"Idempotency-Key": key},
    ),
    Spoken(
        "oasis",
        in_repeatability,
        member("error", "code"),
        mismatch=(400, "mismatch"),
        in_progress=(409, "in_progress"),
        malformed=(400, "key_malformed"),
        always=lambda key: {"Repeatability-Result": "accepted"},
        refused=lambda key: {"Repeatability-Result": "rejected"},
    ),
    Spoken(
        "ec2",
        in_member("ClientToken"),
        xml_code,
        mismatch=(400, "IdempotentParameterMismatch"),
        in_progress=(400, "PriorRequestNotComplete"),
        malformed=(400, "InvalidClientToken"),
        media_type="text/xml",
        form=True,
    ),
    Spoken("aip155", in_member("request_id"), **GOOGLE_ERRORS),
    Spoken("aep155", lambda key: {"body": {"idempotency_key": {"key": key}}}, **GOOGLE_ERRORS),
    Spoken(
        "paypal",
        in_header("PayPal-Request-Id"),
        member("details", 0, "issue"),
        mismatch=(422, "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"),
        in_progress=(409, "PREVIOUS_REQUEST_IN_PROGRESS"),
        malformed=(400, "INVALID_PARAMETER_VALUE"),
    ),
    Spoken(
        "adyen",
        in_header("idempotency-key"),
        member("errorCode"),
        mismatch=(422, "704"),
        in_progress=(409, "704"),
        malformed=(400, "key_malformed"),
        always=lambda key: {"idempotency-key": key},
        refused=lambda key: {"idempotency-key": key, "transient-error": "false"},
    ),
    Spoken(
        "square",
        in_member("idempotency_key"),
        member("errors", 0, "code"),
        mismatch=(400, "IDEMPOTENCY_KEY_REUSED"),
        in_progress=(409, "CONFLICT"),
        malformed=(400, "INVALID_VALUE"),
    ),
    Spoken(
        "iceberg",
        in_header(),
        member("error", "type"),
        mismatch=(422, "UnprocessableEntityException"),
        in_progress=(503, "ServiceUnavailableException"),
        malformed=(400, "BadRequestException"),
        make=uuid7,
    ),
]
each_dialect = pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.dialect)


# The views, each with every dialect.


def create(request: HttpRequest) -> HttpResponse:
    """Writes an effect, and reads the whole body itself."""
    data = request.POST or json.loads(request.body)
    Effect.objects.create(reference=data["reference"])
    return JsonResponse({"reference": data["reference"], "read": sorted(data)}, status=201)


async def acreate(request: HttpRequest) -> HttpResponse:
    data = request.POST or json.loads(request.body)
    await Effect.objects.acreate(reference=data["reference"])
    return JsonResponse({"reference": data["reference"], "read": sorted(data)}, status=201)


class NoCsrf(SessionAuthentication):
    def enforce_csrf(self, request: Request) -> None:
        """Not what is tested here."""


class Create(APIView):
    """Likewise, with REST framework."""

    authentication_classes: ClassVar[list[Any]] = [NoCsrf]
    renderer_classes: ClassVar[list[Any]] = [JSONRenderer]

    def post(self, request: Request) -> Response:
        """Writes an effect."""
        Effect.objects.create(reference=request.data["reference"])
        shown = {"reference": request.data["reference"], "read": sorted(request.data)}
        return Response(shown, status=201)


def by_middleware(policy: Policy) -> Any:
    def view(request: HttpRequest) -> HttpResponse:
        return create(request)

    view.idempotency_policy = policy  # type: ignore[attr-defined]
    return view


def by_mixin(policy: Policy) -> Any:
    body = {"idempotency_policy": policy}
    return type("Mixed", (IdempotentViewMixin, Create), body).as_view()


WAYS: dict[str, Callable[[Policy], Any]] = {
    "decorator": lambda policy: idempotent(policy=policy)(create),
    "async": lambda policy: idempotent(policy=policy)(acreate),
    "mixin": by_mixin,
    "middleware": by_middleware,
}
each_way = pytest.mark.parametrize("way", WAYS)

urlpatterns = [
    path(f"{name}/{way}/", protect(Policy(dialect=name, operation=f"{name} {way}")))
    for name in DIALECTS
    for way, protect in WAYS.items()
]


@pytest.fixture(autouse=True)
def _middleware() -> Iterator[None]:
    with override_settings(MIDDLEWARE=MIDDLEWARE):
        yield


@pytest.fixture
def alice() -> Client:
    return logged_in("alice")


def send(
    client: Client, spoken: Spoken, way: str, key: str | None, reference: str = "a", **more: Any
) -> HttpResponse:
    """Send a request as a client of the dialect does."""
    parts = spoken.send(key) if key is not None else {}
    body = {"reference": reference, **parts.get("body", {}), **more}
    if spoken.form:
        data, media_type = urlencode(body), "application/x-www-form-urlencoded"
    else:
        data, media_type = json.dumps(body), "application/json"
    url = f"/{spoken.dialect}/{way}/"
    return client.post(url, data, content_type=media_type, headers=parts.get("headers", {}))


def assert_refused(response: HttpResponse, spoken: Spoken, expected: tuple[int, Any]) -> None:
    """The response is an error in the dialect."""
    assert (response.status_code, spoken.read(response)) == expected, response.content
    assert response["Content-Type"].partition(";")[0] == spoken.media_type


def assert_headers(response: HttpResponse, expected: dict[str, str]) -> None:
    assert {name: response.headers.get(name) for name in expected} == expected


def test_every_dialect_is_tested() -> None:
    """A new dialect needs a row here."""
    assert [spoken.dialect for spoken in SPOKEN] == [*DIALECTS]


@each_way
@each_dialect
class TestContract:
    """What holds for each dialect and each way to protect a view."""

    def test_replay(self, spoken: Spoken, way: str, alice: Client) -> None:
        """A retry gets the first response, with the marks of the dialect; the view sees it all."""
        key = spoken.make()
        first = send(alice, spoken, way, key)
        again = send(alice, spoken, way, key)
        assert first.status_code == again.status_code == 201, first.content
        assert first.content == again.content
        assert json.loads(first.content)["read"] == sorted(
            ["reference", *spoken.send(key).get("body", {})]
        )
        assert effects() == 1
        assert_headers(first, spoken.always(key))
        assert_headers(again, spoken.always(key))
        assert not is_replay(first)
        assert is_replay(again) is (spoken.marker == "Idempotent-Replayed")

    def test_other_body(self, spoken: Spoken, way: str, alice: Client) -> None:
        """The same key with another body is refused, and executes nothing."""
        key = spoken.make()
        send(alice, spoken, way, key)
        other = send(alice, spoken, way, key, "b")
        assert_refused(other, spoken, spoken.mismatch)
        assert_headers(other, spoken.refused(key))
        assert effects("b") == 0

    def test_in_progress(self, spoken: Spoken, way: str, alice: Client) -> None:
        """A duplicate while the first request holds its claim is refused, and may come again."""
        if connection.vendor == "sqlite":
            pytest.skip("SQLite makes it wait")
        key, inner, once = spoken.make(), [], threading.Lock()

        def duplicate(**_: Any) -> None:
            if once.acquire(blocking=False):
                inner.extend(in_threads([lambda: send(bob, spoken, way, key)]))

        bob = logged_in("alice")
        signals.claimed.connect(duplicate)
        try:
            first = send(alice, spoken, way, key)
        finally:
            signals.claimed.disconnect(duplicate)
        assert first.status_code == 201
        assert_refused(inner[0], spoken, spoken.in_progress)
        assert inner[0]["Retry-After"] == "1"
        assert effects() == 1

    def test_no_key(self, spoken: Spoken, way: str, alice: Client) -> None:
        """Without a key, a request is refused or runs unprotected, as the dialect says."""
        response = send(alice, spoken, way, None)
        if spoken.missing:
            assert_refused(response, spoken, spoken.missing)
            assert effects() == 0
        else:
            assert response.status_code == 201
            send(alice, spoken, way, None)
            assert effects() == 2

    def test_malformed(self, spoken: Spoken, way: str, alice: Client) -> None:
        """A key that is longer than the dialect allows is refused."""
        too_long = "k" * (DIALECTS[spoken.dialect].max_length + 1)
        assert_refused(send(alice, spoken, way, too_long), spoken, spoken.malformed)
        assert effects() == 0

    def test_another_user(self, spoken: Spoken, way: str, alice: Client) -> None:
        """Another user with the same key has an operation of their own."""
        key = spoken.make()
        assert send(alice, spoken, way, key).status_code == 201
        bob = send(logged_in("bob"), spoken, way, key)
        assert bob.status_code == 201
        assert not is_replay(bob)
        assert effects() == 2

    def test_expiry(self, spoken: Spoken, way: str, alice: Client) -> None:
        """After the lifetime of a key that carries no time, it is a new one."""
        key = spoken.make()
        send(alice, spoken, way, key)
        stored = record(key)
        stored.expires_at = LONG_AGO
        stored.save()
        assert send(alice, spoken, way, key).status_code == 201
        assert effects() == 2


# What only some dialects have.


def json_post(client: Client, url: str, body: Any, **headers: str) -> HttpResponse:
    data = body if isinstance(body, str) else json.dumps(body)
    return client.post(url, data, content_type="application/json", headers=headers)


class TestKeysWithTime:
    """Keys that say when they were made, and requests that say when they were sent first."""

    @each_way
    def test_too_old(self, way: str, alice: Client) -> None:
        """A UUIDv7 that is older than the lifetime is not executed, though its record is gone."""
        lifetime = timedelta(minutes=30)
        old = uuid7(datetime.now(UTC) - lifetime - timedelta(seconds=5))
        for _ in range(2):
            response = json_post(
                alice, f"/iceberg/{way}/", {"reference": "a"}, **{"Idempotency-Key": old}
            )
            assert response.status_code == 412
            assert member("error", "type")(response) == "CommitStateUnknownException"
        assert effects() == 0

    @pytest.mark.parametrize("key_format", ["uuid7", "ulid"])
    def test_policy(self, key_format: str, alice: Client) -> None:
        """The same by ``key_format`` alone, with a problem that says so: 412."""
        now = datetime.now(UTC)
        make = {"uuid7": uuid7, "ulid": ulid}[key_format]
        for age, status in ((1, 201), (-4 * 60, 201), (3601, 412), (-6 * 60, 400)):
            key = make(now - timedelta(seconds=age))
            response = json_post(
                alice, f"/timed/{key_format}/", {"reference": "a"}, **{"Idempotency-Key": key}
            )
            assert response.status_code == status, (age, response.content)
            if status == 412:
                assert problem_type(response) == "key-too-old"
        assert effects() == 2

    def test_outlives_its_key(self, alice: Client) -> None:
        """A record lives longer than its key, by what the clocks may differ."""
        key = uuid7(datetime.now(UTC))
        json_post(alice, "/timed/uuid7/", {"reference": "a"}, **{"Idempotency-Key": key})
        stored = record(key)
        assert stored.expires_at
        assert stored.completed_at
        lives = stored.expires_at - stored.completed_at
        assert lives >= timedelta(hours=1) + 2 * identity.CLOCK_SKEW - timedelta(seconds=5)

    def test_forever(self) -> None:
        """Where records live forever, no key is too old."""
        assert identity.lifetime_of(resolve(Policy(ttl=None, key_format="uuid7"))) is None

    @each_way
    @pytest.mark.parametrize(
        ("age", "status"), [(0, 201), (23 * 3600, 201), (25 * 3600, 412), (-600, 400)]
    )
    def test_first_sent(self, way: str, age: int, status: int, alice: Client) -> None:
        """A repeatable request that was first sent before the window is refused: 412."""
        headers = {
            "Repeatability-Request-ID": new_key(),
            "Repeatability-First-Sent": http_date(datetime.now(UTC).timestamp() - age),
        }
        response = json_post(alice, f"/oasis/{way}/", {"reference": "a"}, **headers)
        assert response.status_code == status
        expected = "accepted" if status == 201 else "rejected"
        assert response["Repeatability-Result"] == expected
        assert effects() == (status == 201)

    @each_way
    @pytest.mark.parametrize("name", ["Repeatability-Request-ID", "Repeatability-First-Sent"])
    def test_one_alone(self, way: str, name: str, alice: Client) -> None:
        """One of the two headers alone is refused: 400."""
        value = http_date() if name.endswith("Sent") else new_key()
        response = json_post(alice, f"/oasis/{way}/", {"reference": "a"}, **{name: value})
        assert response.status_code == 400
        assert member("error", "code")(response) == "key_malformed"
        assert effects() == 0

    def test_first_sent_is_compared(self, alice: Client) -> None:
        """A retry that claims to be sent first later is another request: it would never be old."""
        key = new_key()
        for seconds, status in ((60, 201), (60, 201), (30, 400)):
            headers = {
                "Repeatability-Request-ID": key,
                "Repeatability-First-Sent": http_date(NOW.timestamp() - seconds),
            }
            url = "/oasis/decorator/"
            assert json_post(alice, url, {"reference": "a"}, **headers).status_code == status
        assert effects() == 1

    @pytest.mark.parametrize("sent", ["yesterday", "", "2026-11-23T06:25:00Z"])
    def test_no_time(self, sent: str, alice: Client) -> None:
        """A first-sent that is not a date of HTTP is refused: 400."""
        headers = {"Repeatability-Request-ID": new_key(), "Repeatability-First-Sent": sent}
        response = json_post(alice, "/oasis/decorator/", {"reference": "a"}, **headers)
        assert response.status_code == 400
        assert effects() == 0

    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            (NOW.isoformat(), 201),
            ((NOW - timedelta(hours=25)).isoformat(), 412),
            ("2026-11-23", 400),
            (NOW.replace(tzinfo=None).isoformat(), 400),
            (17, 400),
        ],
    )
    def test_first_sent_in_the_body(self, sent: Any, status: int, alice: Client) -> None:
        """AEP-155 has the time in the body, as RFC 3339 writes it."""
        body = {"reference": "a", "idempotency_key": {"key": new_key(), "first_sent": sent}}
        assert json_post(alice, "/aep155/mixin/", body).status_code == status


def ulid(made: datetime) -> str:
    """A ULID that was made then."""
    number = (int(made.timestamp() * 1000) << 80) | (uuid.uuid4().int & ((1 << 80) - 1))
    letters = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    return "".join(letters[number >> (5 * place) & 31] for place in reversed(range(26)))


HOUR = timedelta(hours=1)
urlpatterns += [
    path(f"timed/{each}/", idempotent(key_format=each, ttl=HOUR)(create))
    for each in ("uuid7", "ulid")
]


urlpatterns += [path("unprotected/", create)]


def unparsed(request: HttpRequest) -> HttpResponse:
    """Reads nothing of the body, or knows another way to."""
    Effect.objects.create(reference="a")
    return HttpResponse(status=201)


unparsed.idempotency_policy = Policy(dialect="square")  # type: ignore[attr-defined]


class Unread(IdempotentViewMixin, APIView):
    """The same, with REST framework, for a media type that it does not parse."""

    authentication_classes: ClassVar[list[Any]] = [NoCsrf]
    parser_classes: ClassVar[list[Any]] = [MultiPartParser]
    idempotency_policy = Policy(dialect="square")

    def post(self, request: Request) -> Response:
        """Writes an effect."""
        Effect.objects.create(reference="a")
        return Response(status=201)


class CamelParser(JSONParser):
    """Gives members the names of Python."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        """Parse it."""
        parsed = super().parse(*args, **kwargs)
        return {name.replace("K", "_k"): value for name, value in parsed.items()}


class Camel(IdempotentViewMixin, Create):
    """Has a parser of its own."""

    parser_classes: ClassVar[list[Any]] = [CamelParser]
    idempotency_policy = Policy(dialect="square")


OF_LIST = dataclasses.replace(STRIPE, name="of-list", members=("keys.0",))

urlpatterns += [
    path("unparsed/decorator/", idempotent(dialect="square")(unparsed)),
    path("unparsed/middleware/", unparsed),
    path("unparsed/unread/", Unread.as_view()),
    path("camel/", Camel.as_view()),
    *(
        path(f"of-list/{way}/", protect(Policy(dialect=OF_LIST, operation=way)))
        for way, protect in WAYS.items()
    ),
]


class TestKeysInBodies:
    """Keys in a member of the body."""

    @each_way
    def test_two_that_differ(self, way: str, alice: Client) -> None:
        """A key in the header and another one in the body are refused: 400."""
        body, key = {"reference": "a", "idempotency_key": new_key()}, new_key()
        response = json_post(alice, f"/square/{way}/", body, **{"Idempotency-Key": key})
        assert response.status_code == 400
        assert member("errors", 0, "code")(response) == "INVALID_VALUE"
        assert effects() == 0

    @each_way
    def test_either_place(self, way: str, alice: Client) -> None:
        """The key is no part of what is asked for: it may move to the header in a retry."""
        key = new_key()
        url = f"/square/{way}/"
        first = json_post(alice, url, {"reference": "a", "idempotency_key": key})
        again = json_post(alice, url, {"reference": "a"}, **{"Idempotency-Key": f'"{key}"'})
        both = {"reference": "a", "idempotency_key": key}
        third = json_post(alice, url, both, **{"Idempotency-Key": key})
        assert first.content == again.content == third.content
        assert effects() == 1

    def test_made_up(self, alice: Client) -> None:
        """A key that a browser has made up does not disagree with the client's own."""
        body = {"reference": "a", "idempotency_key": new_key()}
        for made_up in ('"1234567890123456789"', '"9876543210987654321"'):
            headers = {"Idempotency-Key": made_up}
            assert json_post(alice, "/square/mixin/", body, **headers).status_code == 201
        assert effects() == 1

    def test_two_names(self, alice: Client) -> None:
        """Both names of AIP-155 are one key."""
        key, other = new_key(), new_key()
        for body, status in (
            ({"request_id": key}, 201),
            ({"requestId": key}, 201),
            ({"requestId": other, "request_id": key}, 400),
        ):
            response = json_post(alice, "/aip155/mixin/", {"reference": "a", **body})
            assert response.status_code == status
        assert effects() == 1

    @pytest.mark.parametrize("value", [17, {"a": 1}, True, "a b", "ä"])
    def test_no_key(self, value: Any, alice: Client) -> None:
        """A member that is no key is refused: 400."""
        response = json_post(
            alice, "/square/decorator/", {"reference": "a", "idempotency_key": value}
        )
        assert response.status_code == 400
        assert effects() == 0

    @each_way
    @pytest.mark.parametrize(("value", "status"), [(None, 201), ("", 400)])
    def test_empty(self, value: Any, status: int, way: str, alice: Client) -> None:
        """An empty member is refused, as an empty header is; null is no key."""
        response = json_post(alice, f"/square/{way}/", {"reference": "a", "idempotency_key": value})
        assert response.status_code == status
        assert effects() == (status == 201)

    @each_way
    @pytest.mark.parametrize("same", [True, False])
    @pytest.mark.parametrize("name", ["ec2", "square", "aep155", "of-list"])
    def test_one_name_twice(self, name: str, same: bool, way: str, alice: Client) -> None:
        """A member that is there twice is refused if its values differ: 400."""
        key = new_key()
        other = key if same else new_key()
        url, media_type = f"/{name}/{way}/", "application/json"
        if name == "ec2":
            media_type = "application/x-www-form-urlencoded"
            body = f"reference=a&ClientToken={key}&ClientToken={other}"
        elif name == "of-list":
            url = f"/of-list/{way}/"
            body = f'{{"reference": "a", "keys": ["{key}"], "keys": ["{other}"]}}'
        else:
            one, two = (f'{{"key": "{k}"}}' if name == "aep155" else f'"{k}"' for k in (key, other))
            body = f'{{"idempotency_key": {one}, "reference": "a", "idempotency_key": {two}}}'
        for _ in range(2):
            response = alice.post(url, body, content_type=media_type)
            assert response.status_code == (201 if same else 400), response.content
        assert effects() == same

    @each_way
    @pytest.mark.parametrize("empty", [True, False])
    def test_empty_field(self, empty: bool, way: str, alice: Client) -> None:
        """The same of a field of a form."""
        body = urlencode({"reference": "a", "ClientToken": ""} if empty else {"reference": "a"})
        form = "application/x-www-form-urlencoded"
        response = alice.post(f"/ec2/{way}/", body, content_type=form)
        assert response.status_code == (400 if empty else 201)
        assert effects() == (not empty)

    @pytest.mark.parametrize("way", ["decorator", "middleware", "unread"])
    @pytest.mark.parametrize(
        ("charset", "number"), [("latin-1", "1"), ("utf-8", "1" * 5000), ("utf-8", "[")]
    )
    def test_unreadable(self, charset: str, number: str, way: str, alice: Client) -> None:
        """JSON that only the view could read is refused, because a key in it has no effect: 400."""
        body = f'{{"reference": "ä", "idempotency_key": "{new_key()}", "number": {number}}}'
        for headers, status in (({}, 400), ({"Idempotency-Key": new_key()}, 201)):
            for _ in range(2):
                response = alice.generic(
                    "POST",
                    f"/unparsed/{way}/",
                    body.encode(charset),
                    content_type=f"application/json; charset={charset}",
                    headers=headers,
                )
                assert response.status_code == status
                assert status == 201 or b"cannot be read as application/json" in response.content
        assert effects() == 1

    def test_streamed(self, alice: Client) -> None:
        """So is JSON without a length, which only a view that streams it could read."""
        body = json.dumps({"reference": "a", "idempotency_key": new_key()}).encode()
        chunked: dict[str, Any] = {
            "HTTP_TRANSFER_ENCODING": "chunked",
            "CONTENT_LENGTH": "",
            "wsgi.input": BytesIO(body),
            "wsgi.input_terminated": True,
        }
        response = alice.post(
            "/unparsed/decorator/", body, content_type="application/json", **chunked
        )
        assert response.status_code == 400
        assert effects() == 0

    def test_refused_by_rest_framework(self, alice: Client) -> None:
        """What REST framework refuses itself has its own text."""
        for body in ("[", f'{{"idempotency_key": "{new_key()}", "reference": {"1" * 5000}}}'):
            response = json_post(alice, "/square/mixin/", body)
            assert response.status_code == 400
            assert response.json()["detail"].startswith("JSON parse error")
        assert effects() == 0

    def test_another_parser(self, alice: Client) -> None:
        """A key is found where the view's own parser puts it."""
        body = {"reference": "a", "idempotencyKey": new_key()}
        for _ in range(2):
            assert json_post(alice, "/camel/", body).status_code == 201
        assert effects() == 1

    def test_anonymous(self) -> None:
        """A caller who is not told apart needs an unguessable key."""
        response = json_post(
            Client(), "/square/decorator/", {"reference": "a", "idempotency_key": "order-17"}
        )
        assert response.status_code == 400
        assert effects() == 0

    def test_instead_of_header(self, alice: Client) -> None:
        """Where the client chooses no key, one in the body counts for nothing either."""
        body = {"reference": "a"}
        for _ in range(2):
            body["idempotency_key"] = new_key()
            assert json_post(alice, "/derived/", body).status_code == 201
        assert effects() == 1

    @pytest.mark.parametrize("body", ["[1]", '"a"', ""])
    def test_other_bodies(self, body: str, alice: Client) -> None:
        """A body that has no members has no key; the view meets it as it is."""
        alice.raise_request_exception = False
        assert json_post(alice, "/square/decorator/", body).status_code == 500

    def test_upload(self, alice: Client, unprotected: list[Any]) -> None:
        """A form with files is not read for a key, and an error is logged: it is in the header."""
        body = {"reference": "a", "idempotency_key": "a b", "file": SimpleUploadedFile("f", b"x")}
        for _ in range(2):
            assert alice.post("/square/decorator/", body).status_code == 201
        assert effects() == 2
        assert len(unprotected) == 2
        unprotected.clear()
        key = {"Idempotency-Key": new_key()}
        for _ in range(2):
            body["file"].seek(0)  # type: ignore[attr-defined]
            assert alice.post("/square/decorator/", body, headers=key).status_code == 201
        assert effects() == 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_derived_keys(dialect: str, alice: Client) -> None:
    """A key that is made from the request has no format of a dialect, and one operation."""
    with override_settings(IDEMPOTENCY={"POLICY": {"dialect": dialect}}):
        for url in ("/natural/1/", "/natural/2/"):
            for _ in range(2):
                response = json_post(alice, url, {"reference": "a", "number": 17})
                assert response.status_code == 201, response.content
    assert effects() == 2


by_number = keys.instead_of_header(keys.natural("number"))
urlpatterns += [path(f"natural/{each}/", idempotent(key=by_number)(create)) for each in (1, 2)]


class TestStripe:
    """What Stripe's clients rely on."""

    def test_another_endpoint(self, alice: Client) -> None:
        """The same key on another endpoint is refused, not a second operation."""
        key = {"Idempotency-Key": new_key()}
        assert json_post(alice, "/stripe/decorator/", {"reference": "a"}, **key).status_code == 201
        other = json_post(alice, "/stripe/mixin/", {"reference": "a"}, **key)
        assert other.status_code == 400
        assert effects() == 1

    def test_failed_work(self, alice: Client) -> None:
        """With v2, work that has failed runs again; with v1, its error is replayed."""
        for name, executed in (("stripe", 1), ("stripe-v2", 2)):
            key = {"Idempotency-Key": new_key()}
            for _ in range(2):
                response = json_post(alice, f"/declined/{name}/", {}, **key)
                assert response.status_code == 402
            assert len(DECLINED.pop(name)) == executed

    def test_server_error(self, alice: Client) -> None:
        """A 500 is not replayed: its effects were rolled back, so the retry executes."""
        key = {"Idempotency-Key": new_key()}
        for status in (500, 201):
            response = json_post(alice, "/once-broken/", {"reference": "a"}, **key)
            assert response.status_code == status
            assert not is_replay(response)
        assert effects() == 1


DECLINED: dict[str, list[str]] = {}


def declining(name: str) -> Any:
    def decline(request: HttpRequest) -> HttpResponse:
        DECLINED.setdefault(name, []).append("card")
        return JsonResponse({"error": {"type": "card_error"}}, status=402)

    return idempotent(dialect=name)(decline)


BROKEN: list[int] = []


@idempotent(dialect="stripe")
def once_broken(request: HttpRequest) -> HttpResponse:
    response = create(request)
    BROKEN.append(1)
    return HttpResponse(status=500) if len(BROKEN) % 2 else response


urlpatterns += [
    path("declined/stripe/", declining("stripe")),
    path("declined/stripe-v2/", declining("stripe-v2")),
    path("once-broken/", once_broken),
]


class TestACP:
    """What the Agentic Commerce Protocol asks for."""

    @each_way
    @pytest.mark.parametrize(
        ("first", "second", "status"),
        [
            ('{"reference": "a", "n": 1}', '{"n": 1.0, "reference": "a"}', 201),
            ('{"reference": "a", "n": 100}', '{"n": 1e2, "reference": "a"}', 201),
            ('{"reference": "a", "n": [1, 2]}', '{"reference": "a", "n": [2, 1]}', 422),
            ('{"reference": "a", "n": null}', '{"reference": "a"}', 422),
            ('{"reference": "a", "n": 1}', '{"reference": "a", "n": "1"}', 422),
            ('{"reference": "a", "n": 1}', '{"reference": "a", "n": 10}', 422),
            ('{"reference": "a", "n": 0.1}', '{"reference": "a", "n": 1.0}', 422),
            ('{"reference": "a", "n": 1}', '{"reference": "a", "n": -1}', 422),
            ('{"reference": "a", "n": 0}', '{"reference": "a", "n": -0.0}', 201),
            ('{"reference": "a", "n": 9007199254740993}',
             '{"reference": "a", "n": 9007199254740992}', 422),
        ],
    )  # fmt: skip
    def test_equal_json(
        self, way: str, first: str, second: str, status: int, alice: Client
    ) -> None:
        """Bodies are compared as JSON values: 1.0 is 1, and a large number is not rounded."""
        key = {"Idempotency-Key": new_key()}
        assert json_post(alice, f"/acp/{way}/", first, **key).status_code == 201
        assert json_post(alice, f"/acp/{way}/", second, **key).status_code == status
        assert effects() == 1

    def test_another_path(self, alice: Client) -> None:
        """The same key on another object is another operation."""
        key = {"Idempotency-Key": new_key()}
        for pk in (1, 2):
            assert (
                json_post(alice, f"/sessions/{pk}/", {"reference": "a"}, **key).status_code == 201
            )
        assert effects() == 2


urlpatterns += [
    path("sessions/<int:pk>/", idempotent(dialect="acp")(lambda request, pk: create(request))),
    path(
        "derived/",
        idempotent(
            dialect="square",
            key=keys.instead_of_header(lambda call: "17"),
        )(create),
    ),
]


class TestIceberg:
    """What Iceberg's catalogs do."""

    def test_conflict_is_replayed(self, alice: Client) -> None:
        """A conflict that the view found is final, and is replayed."""
        key = {"Idempotency-Key": uuid7(datetime.now(UTC))}
        for _ in range(2):
            assert json_post(alice, "/conflict/", {}, **key).status_code == 409
        assert len(CONFLICTS) == 1

    @pytest.mark.parametrize("error", [*all_errors()])
    def test_keeps_what_may_be_committed(self, error: type[IdempotencyError]) -> None:
        """A client that gets one of these deletes its files, so nothing may have been committed."""
        deletes = {400, 401, 403, 404, 409}
        impossible = {DeadLettered, KeyGuessable}  # it has no key; each key is a UUID
        if error.state != "not-executed" and error not in impossible:
            assert status_of(error, DIALECTS["iceberg"]) not in deletes


CONFLICTS: list[int] = []


@idempotent(dialect="iceberg")
def conflicting(request: HttpRequest) -> HttpResponse:
    CONFLICTS.append(1)
    return JsonResponse({"error": {"code": 409}}, status=409)


urlpatterns += [path("conflict/", conflicting)]


class Body(serializers.Serializer[Any]):
    reference = serializers.CharField()


class Documented(IdempotentViewMixin, GenericAPIView[Any]):
    """A view with a body that drf-spectacular knows."""

    serializer_class = Body
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        return Response({}, status=201)


def documented_view(name: str) -> Any:
    body = {"idempotency_policy": Policy(dialect=name, required=True)}
    view: Any = type("View", (Documented,), body)
    return view.as_view()


DOCUMENTED = [path(f"documented/{name}/", documented_view(name)) for name in DIALECTS]


@cache
def documented() -> Any:
    generator = SchemaGenerator(patterns=DOCUMENTED)  # type: ignore[no-untyped-call]
    schema = generator.get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    validate_schema(schema)
    return schema


def fits(value: Any, content: dict[str, Any]) -> bool:
    """Whether a body is as its schema says."""
    whole = {**content["schema"], "components": documented()["components"]}
    return Draft7Validator(whole).is_valid(value)


@each_dialect
def test_openapi(spoken: Spoken, alice: Client) -> None:
    """The schema has the key's place, and the statuses and bodies of the errors that are sent."""
    operation = documented()["paths"][f"/documented/{spoken.dialect}/"]["post"]
    assert operation["x-idempotency"].get("dialect", "ietf") == spoken.dialect
    key = spoken.make()
    sent = spoken.send(key)
    named = {each["name"].lower(): each for each in operation.get("parameters", [])}
    assert named.keys() == {name.lower() for name in sent.get("headers", {})}
    assert all(each["required"] for each in named.values())
    for content in operation["requestBody"]["content"].values():
        assert fits({"reference": "a", **sent.get("body", {})}, content)
        assert fits({"reference": "a"}, content) is ("body" not in sent)
    shown = {name.lower() for name in operation["responses"]["200"].get("headers", {})}
    own = {name.lower() for name in (spoken.marker, *spoken.always(key)) if name}
    assert shown == own | {"idempotency-status"}
    send(alice, spoken, "mixin", key)
    refused = [send(alice, spoken, "mixin", key, "b"), send(alice, spoken, "mixin", "k" * 256)]
    for response in refused:
        [(media_type, content)] = operation["responses"][str(response.status_code)][
            "content"
        ].items()
        assert media_type == spoken.media_type
        assert fits(response.content.decode() if spoken.form else response.json(), content)
    assert str(spoken.in_progress[0]) in operation["responses"]


# Dialects of a project.

MINE = dataclasses.replace(
    STRIPE, name="mine", header="X-Request-Key", members=("meta.key",), replayed_header="X-Again"
)
urlpatterns += [path("mine/", idempotent(dialect=MINE)(create))]


class TestOwn:
    """A dialect of the project's own, and the project's policy."""

    def test_own(self, alice: Client) -> None:
        """A dialect of one's own is passed as it is."""
        key = new_key()
        first = json_post(alice, "/mine/", {"reference": "a"}, **{"X-Request-Key": key})
        again = json_post(alice, "/mine/", {"reference": "a", "meta": {"key": key}})
        assert (first.status_code, again.status_code) == (201, 400)  # "meta" is another body
        again = json_post(alice, "/mine/", {"reference": "a"}, **{"X-Request-Key": key})
        assert again["X-Again"] == "true"
        assert not is_replay(again)

    def test_by_path(self) -> None:
        """… or by its dotted path."""
        assert resolve(Policy(dialect=f"{__name__}.MINE")).dialect is MINE

    def test_project(self, alice: Client) -> None:
        """The project's policy names the dialect of all views that name none."""
        with override_settings(IDEMPOTENCY={"POLICY": {"dialect": "square", "required": True}}):
            response = json_post(alice, "/default/", {"reference": "a"})
            assert response.status_code == 400
            assert member("errors", 0, "code")(response) == "MISSING_REQUIRED_PARAMETER"
            body = {"reference": "a", "idempotency_key": new_key()}
            for _ in range(2):
                assert json_post(alice, "/default/", body).status_code == 201
        assert effects() == 1

    def test_defaults(self) -> None:
        """What a view sets comes before what a dialect brings, which comes before the project's."""
        month, week = timedelta(days=30), timedelta(days=7)
        assert resolve(Policy(dialect="stripe-v2")).ttl == month
        assert resolve(Policy(dialect="stripe-v2", ttl=week)).ttl == week
        with override_settings(IDEMPOTENCY={"POLICY": {"ttl": week, "mode": "leased"}}):
            policy = resolve(Policy(dialect="stripe-v2"))
            assert (policy.ttl, policy.mode) == (month, "leased")
        with override_settings(IDEMPOTENCY={"POLICY": {"ttl": week, "dialect": "stripe-v2"}}):
            assert resolve(PROJECT_POLICY).ttl == week
            assert resolve(PROJECT_POLICY).scope == STRIPE_V2.defaults["scope"]
            back = resolve(Policy(dialect="ietf"))
            assert (back.scope, back.should_store) == (DEFAULTS.scope, None)

    @pytest.mark.parametrize("dialect", [OASIS, ACP])
    def test_short_window(self, dialect: Dialect) -> None:
        """A lifetime that is shorter than the dialect promises is refused."""
        with pytest.raises(ImproperlyConfigured, match="promises its clients at least"):
            resolve(Policy(dialect=dialect, ttl=timedelta(minutes=4)))

    @pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
    def test_value(self, dialect: Dialect) -> None:
        """A dialect is a value: it is compared, and goes to another process."""
        again = pickle.loads(pickle.dumps(Policy(dialect=dialect)))
        assert again == Policy(dialect=dialect.name)
        assert hash(again) == hash(Policy(dialect=dialect))
        assert dataclasses.replace(dialect, max_length=1) != dialect

    def test_adyen_without_store(self) -> None:
        """Adyen's own code says that the keys cannot be looked up."""
        body: Any = error_body(StoreUnavailable(), DIALECTS["adyen"])
        assert (body["status"], body["errorCode"]) == (503, "703")

    @pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
    def test_every_error(self, dialect: Dialect) -> None:
        """Each dialect has a body for each error."""
        for error in all_errors():
            body = error_body(error(), dialect)
            assert isinstance(body, str) or json.dumps(body)
            assert error.default_detail[:30] in str(body)


@idempotent
def default(request: HttpRequest) -> HttpResponse:
    return create(request)


urlpatterns += [path("default/", default)]
