"""Each attempt at an operation is kept: what happened the first time is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client, override_settings

from idempotency_django.models import KEPT_ATTEMPTS, IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.stores.records import Payload
from idempotency_django.testing import an_operation, eventually
from idempotency_django.testing.contract import as_claim
from tests.settings import ALIASES
from tests.support.admin_pages import act, detail, member, page

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

LEASE = timedelta(seconds=99)


@pytest.fixture(params=ALIASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each database in turn, as that of the default store."""
    backend = "idempotency_django.stores.database.DatabaseStore"
    using = ALIASES[request.param]
    stored = {"default": {"BACKEND": backend, "OPTIONS": {"using": using}}}
    with override_settings(IDEMPOTENCY={"STORES": stored}):
        yield using


def claimed(key: str, lease: timedelta = LEASE) -> Any:
    return as_claim(stores["default"].acquire(an_operation(key=key, lease=lease)))


def record(using: str) -> IdempotencyKey:
    return IdempotencyKey.objects.using(using).get()


def events(client: Client, using: str) -> list[str]:
    """What the page of the only record tells, in order, without what is yet to come."""
    text = page(client, detail(record(using))).split("idempotency-timeline")[1].split("</ol>")[0]
    entries = re.findall(r"<li>(.*?)</li>", text, re.DOTALL)
    return [re.findall(r"<span>(.*?)</span>", each, re.DOTALL)[1].strip() for each in entries]


def test_every_attempt(using: str) -> None:
    """The timeline tells when each attempt began, how it ended, and to those who may see
    responses, by which error.
    """
    store = stores["default"]
    assert store.fail(claimed("k"), "OSError: the provider is down")
    claimed("k", timedelta(milliseconds=1))
    eventually(lambda: IdempotencyKey.objects.using(using).interrupted().exists())
    assert store.complete(claimed("k"), Payload(201, (), b""))

    reader = member("view_idempotencykey", "view_response")
    assert events(reader, using) == [
        *("Created", "Attempt 1: failed"),
        *("Attempt 2 began", "Attempt 2: interrupted"),
        *("Attempt 3 began", "Completed"),
    ]
    assert "OSError: the provider is down" in page(reader, detail(record(using)))
    assert "OSError" not in page(member("view_idempotencykey"), detail(record(using)))


def test_bounded(using: str) -> None:
    """The last ones are kept, however many there are, and the beginning of their errors."""
    for _ in range(KEPT_ATTEMPTS + 3):
        assert stores["default"].fail(claimed("k"), "no" * 4_000)
    kept = record(using).attempts
    assert [each["attempt"] for each in kept] == list(range(3, KEPT_ATTEMPTS + 3))
    assert {len(each["error"]) for each in kept} == {1_000}


@pytest.mark.parametrize("outcome", ["complete", "release"])
def test_told_once(using: str, outcome: str) -> None:
    """What an operator has settled is told by the log, with their name, and not a second time."""
    claimed("k", timedelta(milliseconds=1))
    eventually(lambda: IdempotencyKey.objects.using(using).interrupted().exists())
    operator = member("view_idempotencykey", "settle")
    sent = {"outcome": outcome, "reason": "Charge 17.", "status": 201, "body": ""}
    act(operator, "settle", record(using), **sent)

    def told() -> list[str]:
        return [each.split("<span")[0].strip() for each in events(operator, using)]

    if outcome == "complete":
        assert told() == ["Created", "Completed by hand with status 201: Charge 17."]
        return
    assert told() == ["Created", "Released for retry: Charge 17."]
    assert stores["default"].fail(claimed("k"), "OSError")
    assert stores["default"].complete(claimed("k"), Payload(201, (), b""))
    assert told() == [
        *("Created", "Released for retry: Charge 17."),
        *("Attempt 2 began", "Attempt 2: failed"),
        *("Attempt 3 began", "Completed"),
    ]
