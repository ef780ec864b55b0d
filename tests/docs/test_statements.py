"""The documented statements of the two modes are those that PostgreSQL is sent."""

from __future__ import annotations

import re
import uuid

import pytest
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from shop.models import Charge

from idempotency_django.decorators import idempotent
from tests.docs.examples import ROOT

PAGE = ROOT / "docs" / "effects" / "modes.md"
KEYWORDS = re.compile(r"^(BEGIN|COMMIT|ROLLBACK|INSERT|SELECT|UPDATE|DELETE)", re.MULTILINE)

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL"),
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]


@idempotent
def charge(request: HttpRequest) -> JsonResponse:
    Charge.objects.create(reference="order-17", amount=500)
    return JsonResponse({}, status=201)


@idempotent(mode="leased")
def leased_charge(request: HttpRequest) -> JsonResponse:
    if "step" in request.GET:
        request.idempotency.step("charge", lambda: 17)  # type: ignore[attr-defined]
    return JsonResponse({}, status=201)


urlpatterns = [path("charges/", charge), path("leased/", leased_charge)]


def documented(heading: str) -> list[str]:
    """The statements of the section under a heading, by their first words."""
    section = re.split(rf"\n##+ {heading}\n", PAGE.read_text())[1].partition("\n## ")[0]
    block = section.partition("```sql\n")[2].partition("```")[0]
    assert block, heading
    return keywords(block)


def keywords(block: str) -> list[str]:
    """The first words of the statements of a block."""
    # An INSERT goes on with its SELECT in the next line.
    return KEYWORDS.findall(re.sub(r"(INSERT [^;]*?)\nSELECT", r"\1 SELECT", block))


def sent(client: Client, key: str, query: str = "", url: str = "/charges/") -> list[str]:
    """The statements that a request leads to, its view's own apart."""
    client.raise_request_exception = False
    with CaptureQueriesContext(connection) as queries:
        client.post(f"{url}{query}", headers={"Idempotency-Key": key})
    statements = [query["sql"] for query in queries if Charge._meta.db_table not in query["sql"]]
    # Django notes its BEGIN and its COMMIT by themselves, also where they were sent with another.
    alone = [each.removeprefix("BEGIN; ").removesuffix("; COMMIT") for each in statements]
    # What must have changed a row is within a statement that fails if it has not.
    each = [part.removeprefix("WITH written AS (") for one in alone for part in one.split("; ")]
    return [KEYWORDS.findall(statement)[0] for statement in each]


def test_first_request(client: Client) -> None:
    """A first request locks its key, looks, and writes its record once."""
    assert sent(client, str(uuid.uuid4())) == documented("The first request")


def test_replay(client: Client) -> None:
    """A replay is found and counted in one statement."""
    key = str(uuid.uuid4())
    sent(client, key)
    assert sent(client, key) == [*documented("A replay")]


def test_leased(client: Client) -> None:
    """A leased request claims and completes, each by itself; a step is one statement more."""
    page = PAGE.read_text().partition("\n## How leased mode works")[2]
    request, step = map(keywords, re.findall(r"```sql\n(.*?)```", page, re.DOTALL))
    *claim, complete = request
    assert sent(client, str(uuid.uuid4()), url="/leased/") == [*claim, complete]
    statements = sent(client, str(uuid.uuid4()), "?step", url="/leased/")
    assert statements == [*claim, "BEGIN", *step, "COMMIT", complete]
