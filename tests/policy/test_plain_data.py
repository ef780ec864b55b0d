"""What identifies a request: every value that a process could see otherwise is told apart."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
import yaml
from django.contrib.auth.models import Group, User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.test.utils import isolate_apps
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.parsers import BaseParser, JSONParser
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.policy import fingerprints
from idempotency_django.policy.digests import canonical
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Color(Enum):
    RED = 1
    BLUE = 2


class Shape(Enum):
    RED = 1


class Size(IntEnum):
    RED = 1


@dataclass
class Point:
    x: int
    y: int


@dataclass
class Vector:
    x: int
    y: int


class Model:
    """What pydantic's models look like from outside."""

    model_fields: ClassVar[dict[str, Any]] = {"x": int}

    def __init__(self, x: Any) -> None:
        self.x = x

    def model_dump(self) -> dict[str, Any]:
        return {"x": self.x}


class Odd:
    """An object without a text of its own: Python gives its address."""


# Each is built anew by each call, and equal to nothing else in the list.
PLAIN: list[Any] = [
    lambda: Decimal("1.0"),
    lambda: Decimal("1.00"),
    lambda: 1.0,
    lambda: UUID(int=1),
    lambda: date(2026, 1, 1),
    lambda: datetime(2026, 1, 1, tzinfo=UTC),
    lambda: datetime(2026, 1, 1),  # noqa: DTZ001  # a naive one
    lambda: time(1, 2),
    lambda: timedelta(days=1),
    lambda: b"a",
    lambda: "a",
    lambda: Color.RED,
    lambda: Shape.RED,
    lambda: {1, 2, "a"},
    lambda: [1, 2],
    lambda: Point(1, 2),
    lambda: Vector(1, 2),
    lambda: {"x": 1, "y": 2},
    lambda: Model(1),
    lambda: User(pk=1),
    lambda: Group(pk=1),
    lambda: {"at": date(2026, 1, 1), "by": User(pk=1)},
]


@pytest.mark.parametrize("one", range(len(PLAIN)))
def test_plain_values(one: int) -> None:
    """Two equal values are one request; a value of another type or content is another."""
    assert canonical(PLAIN[one]()) == canonical(PLAIN[one]())
    assert all(
        (canonical(PLAIN[one]()) == canonical(other())) == (one == place)
        for place, other in enumerate(PLAIN)
    )


@isolate_apps("tests")
def test_equal_models() -> None:
    """A model that was loaded through a proxy is the same; an IntEnum is its number."""

    class Proxy(User):
        class Meta:
            proxy = True
            app_label = "tests"

    assert canonical(Proxy(pk=1)) == canonical(User(pk=1))
    assert canonical(Size.RED) == canonical(1)


@pytest.mark.parametrize(
    "odd",
    [Odd(), [Odd()], {"a": Odd()}, {Odd(): 1}, {Odd()}, Point(Odd(), 1), Model(Odd()), Odd, Point],
    ids="object in-list in-dict as-name in-set in-dataclass in-pydantic class dataclass".split(),
)
def test_other_objects(odd: Any) -> None:
    """An object whose text is only good for this process is refused by name, wherever it is."""
    with pytest.raises(TypeError, match=r"cannot be compared with a retry's") as caught:
        canonical(odd)
    assert "test_plain_data" in str(caught.value) or "type" in str(caught.value)
    with pytest.raises(TypeError):
        idempotent_call(lambda _: None, key="k", scope="s", fingerprint=odd)


@pytest.mark.parametrize("kind", [list, set])
def test_value_in_itself(kind: Any) -> None:
    """What contains itself, or is nested too deep to be written, is refused."""
    odd: Any = []
    odd.append(odd if kind is list else {1})
    for _ in range(0 if kind is list else 3000):
        odd = [odd]
    with pytest.raises(TypeError, match="contains itself or is nested too deep"):
        canonical(odd)


def test_model_that_is_not_saved() -> None:
    """A model without a primary key cannot be told from another one."""
    with pytest.raises(TypeError, match="it has no primary key"):
        canonical(User(username="a"))


def test_in_another_process() -> None:
    """Sets and objects are the same in a process whose hashes are seeded otherwise."""
    code = (
        "import uuid, datetime, decimal;"
        "from idempotency_django.policy.fingerprints import canonical;"
        "print(canonical([{'a', 'b', 'c', 1, None}, uuid.UUID(int=1), datetime.date.max]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


# Calls.


def charge(execution: Any) -> str:
    Effect.objects.create(reference="charge")
    return "charged"


def refund(execution: Any) -> str:
    Effect.objects.create(reference="refund")
    return "refunded"


class TestCalls:
    """``idempotent_call``."""

    def test_two_functions(self) -> None:
        """Under one key and scope another function is not given the first one's result."""
        key = new_key()
        assert idempotent_call(charge, key=key, scope="s") == "charged"
        with pytest.raises(FingerprintMismatch):
            idempotent_call(refund, key=key, scope="s")
        assert idempotent_call(charge, key=key, scope="s") == "charged"
        assert [effect.reference for effect in Effect.objects.all()] == ["charge"]

    def test_empty_scope(self) -> None:
        """A scope that is empty is an error that says so; nothing runs."""
        with pytest.raises(ValueError, match="scope is empty"):
            idempotent_call(charge, key=new_key(), scope="")
        assert not Effect.objects.exists()


# Requests.


class YAMLParser(BaseParser):
    media_type = "application/yaml"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        class Loader(yaml.SafeLoader):
            pass

        Loader.add_constructor("!odd", lambda loader, node: Odd())
        return yaml.load(stream, Loader)


class Parsing(IdempotentViewMixin, APIView):
    parser_classes = [JSONParser, YAMLParser]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response(status=201)


class Looks(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return bool(request.data)


class Looking(Parsing):
    permission_classes = [Looks]


def view(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return JsonResponse({}, status=201)


urlpatterns = [
    path("drf/", Parsing.as_view()),
    path("looking/", Looking.as_view()),
    path("fields/", csrf_exempt(idempotent(fingerprint=fingerprints.fields(exclude=["t"]))(view))),
]


def send(client: Client, url: str, body: str, kind: str, key: str) -> HttpResponse:
    return client.post(url, body, content_type=kind, headers={"Idempotency-Key": key})


class TestRequests:
    """What a client sends."""

    @pytest.mark.parametrize("url", ["/fields/", "/drf/"])
    @pytest.mark.parametrize(
        ("first", "other"),
        [
            ('{"a":2}', '{"a":1,"a":2}'),
            ('{"b":{"a":1,"a":2}}', '{"b":{"a":2}}'),
            ('{"a":1.0}', '{"a":1.00}'),
            ('{"a":1.5}', '{"a":[NaN,"1.5"]}'),
        ],
    )
    def test_what_parsers_take_for_equal(
        self, client: Client, url: str, first: str, other: str
    ) -> None:
        """Bodies that a parser may take for equal are two requests: a name that is there twice."""
        key, kind = new_key(), "application/json"
        one = send(client, url, first, kind, key)
        assert_replays(one, send(client, url, first, kind, key))
        assert_problem(send(client, url, other, kind, key), 422, "mismatch")
        assert Effect.objects.count() == 1

    def test_other_media_types_that_were_read(self, client: Client) -> None:
        """Where a permission has read such a body, its bytes are gone: nothing can be compared."""
        with pytest.raises(ImproperlyConfigured, match="was read as a stream before"):
            send(client, "/looking/", "a: 1", "application/yaml", new_key())
        assert not Effect.objects.exists()
        key, kind = new_key(), "application/json"
        first = send(client, "/looking/", '{"a": 1, "b": 2}', kind, key)
        assert_replays(first, send(client, "/looking/", '{"b": 2, "a": 1}', kind, key))
