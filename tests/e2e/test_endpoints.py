"""What each endpoint of the reference app returns, request by request."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from .clients import LEASED, PROTECTED, TRANSACTIONAL, Api, Order

pytestmark = pytest.mark.e2e

every_protected_endpoint = pytest.mark.parametrize("path", PROTECTED)


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


def problem(response: httpx.Response) -> str:
    """The fragment of the problem's type, of a response that is a problem."""
    assert response.headers["Content-Type"] == "application/problem+json"
    told = response.json()
    assert told["status"] == response.status_code
    return str(told["type"].rpartition("#")[2])


@every_protected_endpoint
def test_a_retry_receives_the_first_response(api: Api, path: str) -> None:
    """The retry has the status, the bytes and the Location of the first; one effect is there."""
    order = Order()
    first, retry = api.send(path, order), api.send(path, order)

    assert first.status_code == 201
    assert not is_replay(first)
    told = first.json()
    assert told.pop("id")
    assert told == {"reference": order.reference, "amount": 100, "currency": "EUR"}

    assert is_replay(retry)
    assert retry.status_code == first.status_code
    assert retry.content == first.content
    for name in ("Location", "Content-Type"):
        assert retry.headers[name] == first.headers[name]
    assert api.effects(order) == 1


@every_protected_endpoint
def test_another_request_under_the_same_key_is_refused(api: Api, path: str) -> None:
    """A key that was used for another request gets 422 and does nothing."""
    order = Order()
    api.send(path, order)

    response = api.send(path, replace(order, amount=999))

    assert response.status_code == 422
    assert problem(response) == "mismatch"
    assert api.effects(order) == 1


@pytest.mark.parametrize("path", TRANSACTIONAL)
@pytest.mark.parametrize(("fault", "status"), [("raise", 500), ("status=503", 503)])
def test_a_failed_attempt_leaves_nothing_and_a_retry_is_executed(
    api: Api, path: str, fault: str, status: int
) -> None:
    """A 5xx, raised or returned, rolls the effect back and frees the key at once."""
    order = Order()

    failed = api.send(path, replace(order, fault=fault))
    assert failed.status_code == status
    assert api.effects(order) == 0

    retry = api.send(path, order)
    assert retry.status_code == 201
    assert not is_replay(retry)
    assert api.effects(order) == 1


@pytest.mark.parametrize("path", LEASED)
@pytest.mark.parametrize(("fault", "status", "stored"), [("raise", 500, 0), ("status=503", 503, 1)])
def test_a_failed_attempt_keeps_the_steps_that_it_had_done(
    api: Api, path: str, fault: str, status: int, stored: int
) -> None:
    """A 5xx rolls back the step it was raised in, none before it; a retry does what is left."""
    order = Order()

    failed = api.send(path, replace(order, fault=fault))
    assert failed.status_code == status
    assert api.effects(order) == stored

    retry = api.send(path, order)
    assert retry.status_code == 201
    assert not is_replay(retry)
    assert api.effects(order) == 1
