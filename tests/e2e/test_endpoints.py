"""What each endpoint of the reference app returns, request by request."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from .clients import KEY_REQUIRED, LEASED, PROTECTED, TRANSACTIONAL, UNPROTECTED, Api, Order
from .conftest import Server, client_of
from .databases import Database

pytestmark = pytest.mark.e2e

every_protected_endpoint = pytest.mark.parametrize("path", PROTECTED)


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


def problem(response: httpx.Response) -> str:
    """The last part of the problem's type, of a response that is a problem."""
    assert response.headers["Content-Type"] == "application/problem+json"
    told = response.json()
    assert told["status"] == response.status_code
    return str(told["type"].rsplit("/", 1)[-1])


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


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("store", ["redis", "cached"])
def test_a_retry_receives_the_first_response_with_redis(
    database: Database, store: str, request: pytest.FixtureRequest
) -> None:
    """The same holds of every endpoint where Redis keeps the records, or serves the replays."""
    with client_of(request.getfixturevalue(f"{store}_server")) as api:
        for path in PROTECTED:
            order = Order()
            first, *retries = [api.send(path, order) for _ in range(3)]

            assert first.status_code == 201
            assert not is_replay(first)
            for retry in retries:
                assert is_replay(retry)
                assert retry.status_code == 201
                assert retry.content == first.content
                assert retry.headers["Location"] == first.headers["Location"]
            assert api.effects(order) == 1


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_an_error_frees_the_key_in_redis(database: Database, redis_server: Server) -> None:
    """What a view raises rolls back its own transaction and frees its key, wherever that is."""
    with client_of(redis_server) as api:
        for path in PROTECTED:
            order = Order()
            assert api.send(path, replace(order, fault="raise")).status_code == 500
            assert api.effects(order) == 0
            assert api.send(path, order).status_code == 201
            assert api.effects(order) == 1


@every_protected_endpoint
def test_location_leads_to_the_effect(api: Api, path: str) -> None:
    """Location can be followed by the owner, and by nobody else."""
    first = api.send(path, Order())

    def look(token: str) -> httpx.Response:
        headers = {"Authorization": f"Token {token}"}
        return api.get(first.headers["Location"], headers=headers)

    assert look("alice-token").json() == first.json()
    assert look("bob-token").status_code == 404


@every_protected_endpoint
def test_another_request_under_the_same_key_is_refused(api: Api, path: str) -> None:
    """A key that was used for another request gets 422 and does nothing."""
    order = Order()
    api.send(path, order)

    response = api.send(path, replace(order, amount=999))

    assert response.status_code == 422
    assert problem(response) == "mismatch"
    assert api.effects(order) == 1


@every_protected_endpoint
@pytest.mark.parametrize("key", ['"unterminated', "two words", "k" * 256, '""'])
def test_a_malformed_key_is_refused(api: Api, path: str, key: str) -> None:
    """What is not one string of 1-255 visible ASCII characters gets 400 and does nothing."""
    order = Order(key=key)

    response = api.send(path, order)

    assert response.status_code == 400
    assert problem(response) == "key-malformed"
    assert api.effects(order) == 0


@every_protected_endpoint
def test_two_keys_are_refused(api: Api, path: str) -> None:
    """Two header lines name no key, whichever is meant: 400, and nothing is done."""
    order = Order()

    headers = [*order.headers, ("Idempotency-Key", "another")]
    response = api.send(path, order, headers=headers)

    assert response.status_code == 400
    assert problem(response) == "key-malformed"
    assert api.effects(order) == 0


@every_protected_endpoint
def test_a_bare_and_a_quoted_key_are_one(api: Api, path: str) -> None:
    """The quotation marks of RFC 9651 are no part of the key."""
    order = Order()
    bare = api.send(path, order)

    quoted = api.send(path, replace(order, key=f'"{order.key}"'))

    assert is_replay(quoted)
    assert quoted.content == bare.content
    assert api.effects(order) == 1


@pytest.mark.parametrize("path", KEY_REQUIRED)
def test_a_required_key_that_is_missing_is_refused(api: Api, path: str) -> None:
    """Where the key is required, a request without one gets 400 and does nothing."""
    order = Order(key=None)

    response = api.send(path, order)

    assert response.status_code == 400
    assert problem(response) == "key-missing"
    assert api.effects(order) == 0


@pytest.mark.parametrize("path", [path for path in PROTECTED if path not in KEY_REQUIRED])
def test_elsewhere_the_key_is_optional(api: Api, path: str) -> None:
    """Where it is not required, each request without a key is executed."""
    order = Order(key=None)

    responses = [api.send(path, order) for _ in range(2)]

    assert [response.status_code for response in responses] == [201, 201]
    assert api.effects(order) == 2


def test_without_protection_a_retry_is_executed_again(api: Api) -> None:
    """The unprotected endpoint takes no notice of the key."""
    order = Order()

    responses = [api.send(UNPROTECTED, order) for _ in range(2)]

    assert [response.status_code for response in responses] == [201, 201]
    assert not any(is_replay(response) for response in responses)
    assert api.effects(order) == 2


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


@every_protected_endpoint
@pytest.mark.parametrize("body", [b"{", b'{"reference": "incomplete"}'])
def test_an_invalid_body_is_refused(api: Api, path: str, body: bytes) -> None:
    """What cannot be understood gets 400, the first time and when it is retried."""
    order = Order()

    responses = [api.send(path, order, content=body) for _ in range(2)]

    assert [response.status_code for response in responses] == [400, 400]
