"""What the clients do, sync and async."""

from __future__ import annotations

import io
import socket
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from idempotency_django.client import OutcomeUnknown, key_for
from tests.support.servers import free_port

from .drivers import Driver, Httpx
from .scripted import CUT, CUT_BODY, Reply, Scripted, scripted

KEY = key_for("order", 17)

Make = Callable[..., Driver]


@pytest.mark.parametrize(
    "fault",
    [
        CUT,
        CUT_BODY,
        Reply(500),
        Reply(503),
        Reply(425),
        Reply(429, {"Retry-After": "0"}),
        Reply(409, {"Retry-After": "0"}),
        Reply(409, {"Content-Type": "application/problem+json"}, b'{"retryable": true}'),
    ],
    ids=str,
)
def test_same_key(make: Make, server: Scripted, fault: Reply | str) -> None:
    """Each attempt sends the same key and the same body, until there is a final response."""
    server.script = [fault, fault, Reply(201, body=b'{"id": 1}')]

    response = make().send("POST", server.url, json={"amount": 500})

    assert (response.status_code, response.json()) == (201, {"id": 1})
    assert len(server.received) == 3
    assert len(set(server.keys)) == 1
    assert {request.body.replace(b" ", b"") for request in server.received} == {b'{"amount":500}'}
    uuid.UUID((server.keys[0] or "").strip('"'))


@pytest.mark.parametrize(
    "final",
    [
        Reply(409),
        Reply(422, {"Retry-After": "0"}),
        Reply(500, {"Idempotent-Replayed": "true"}),
        Reply(503, {"Idempotency-Status": "replayed; ttl=86399; attempt=1"}),
        Reply(503, {"Content-Type": "application/problem+json"}, b'{"retryable": false}'),
    ],
    ids=str,
)
def test_final(make: Make, server: Scripted, final: Reply) -> None:
    """A response that would be the same next time is returned at once."""
    server.script = [final]
    assert make().send("POST", server.url, json={}).status_code == final.status
    assert len(server.received) == 1


def test_own_key(make: Make, server: Scripted) -> None:
    """The caller's key is sent, in quotation marks if the client writes the header."""
    make().send("POST", server.url, key=KEY)
    make().send("POST", server.url, headers={"Idempotency-Key": KEY})
    assert server.keys == [f'"{KEY}"', KEY]


def test_own_header(make: Make, server: Scripted) -> None:
    """The header has another name, and the key no quotation marks, if the server needs that."""
    make(header="PayPal-Request-Id", quoted=False).send("POST", server.url)
    uuid.UUID(server.received[0].headers["PayPal-Request-Id"])
    assert server.keys == [None]


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_safe_methods(make: Make, server: Scripted, method: str) -> None:
    """A safe request has no key, and is not retried."""
    server.script = [Reply(503)]
    assert make().send(method, server.url).status_code == 503
    assert server.keys == [None]


def test_lost(make: Make, server: Scripted) -> None:
    """If no response arrives, the caller gets the key, and the last error as the cause."""
    server.script = [CUT, CUT, CUT]

    with pytest.raises(OutcomeUnknown, match="the limit is attempts=3") as caught:
        make(attempts=3).send("POST", server.url, key=KEY)

    assert (caught.value.key, caught.value.attempts) == (KEY, 3)
    assert caught.value.idempotency_key == KEY  # type: ignore[attr-defined]
    assert caught.value.__cause__ is not None
    assert len(server.received) == 3


def test_not_final(make: Make, server: Scripted) -> None:
    """A server error is not final, so the caller gets it with the key."""
    server.script = [Reply(503), Reply(503, body=b"sorry")]
    with pytest.raises(OutcomeUnknown) as caught:
        make(attempts=2).send("POST", server.url, key=KEY)
    assert caught.value.response.text == "sorry"


def test_throttled_after_a_loss(make: Make, server: Scripted) -> None:
    """If the first response was lost, a later 429 does not say what happened."""
    server.script = [CUT, Reply(429)]
    with pytest.raises(OutcomeUnknown) as caught:
        make(attempts=2).send("POST", server.url)
    assert caught.value.response.status_code == 429


def test_never_connected(make: Make) -> None:
    """If no attempt reached the server, the error is the library's own, and carries the key."""
    with pytest.raises(httpx.ConnectError) as caught:
        make(attempts=2).send("POST", f"http://127.0.0.1:{free_port()}", key=KEY)
    assert caught.value.idempotency_key == KEY  # type: ignore[attr-defined]


def test_timeout(make: Make) -> None:
    """A timeout is a lost response."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        timeout = {"timeout": 0.05}
        with pytest.raises(OutcomeUnknown) as caught:
            make(attempts=2).send("POST", url, **timeout)
    assert "Timeout" in type(caught.value.__cause__).__name__


def test_generator(make: Make, server: Scripted) -> None:
    """A body that can be sent only once is refused, before anything is sent."""

    async def later() -> Any:
        yield b"once"

    client = make()
    for body in (later(),) if client.is_async else ((part for part in [b"once"]), io.BytesIO(b"1")):
        with pytest.raises(ValueError, match="can be sent only once"):
            client.send("POST", server.url, content=body)
    assert server.received == []


def test_files(make: Make, server: Scripted) -> None:
    """A file in a form is sent again as a whole."""
    server.script = [CUT]
    make().send("POST", server.url, files={"scan": io.BytesIO(b"the file")})
    first, second = server.received
    assert first.body == second.body
    assert b"the file" in first.body


@pytest.mark.parametrize("key", ["", "a,b", 'a"b', "ä", "a" * 256, 17, uuid.uuid4()])
@pytest.mark.parametrize("make", [Httpx])
def test_invalid_key(make: Make, server: Scripted, key: Any) -> None:
    """A key that no header can have is refused."""
    with pytest.raises(ValueError, match="is not a valid idempotency key"):
        make().send("POST", server.url, key=key)
    assert server.received == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects(make: Make, server: Scripted, status: int) -> None:
    """A request with a key follows no redirect, so that no other origin gets the key, and no page
    counts as the response. Other requests do.
    """
    for method, key, sent in (("POST", KEY, 0), ("POST", None, 1), ("GET", None, 1)):
        with scripted() as other:
            server.script = [Reply(status, {"Location": f"{other.url}/there/"})]
            response = make().send(method, server.url, key=key, redirects=True)
            assert response.status_code == (status if key else 201)
            assert other.keys == [None] * sent


def test_digest(make: Make, server: Scripted) -> None:
    """Both requests of digest authentication have the same key, and so do their retries."""
    challenge = Reply(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    server.script = [challenge, CUT, challenge]
    auth = httpx.DigestAuth("user", "password")
    response = make().send("POST", server.url, auth=auth, key=KEY)
    assert response.status_code == 201
    assert len(set(server.keys)) == 1
    assert len(server.received) >= 3


def test_stream(make: Make, server: Scripted) -> None:
    """A streamed response is retried by its status, and by its problem, which is read for that."""
    problem = Reply(409, {"Content-Type": "application/problem+json"}, b'{"retryable": true}')
    server.script = [Reply(503), problem, Reply(201, body=b'{"id": 1}')]
    response = make().send("POST", server.url, stream=True)
    assert (response.json(), len(set(server.keys))) == ({"id": 1}, 1)


def test_undecodable(make: Make, server: Scripted) -> None:
    """If the response cannot be decoded, the request was executed nevertheless. No retry mends
    that.
    """
    server.script = [Reply(201, {"Content-Encoding": "gzip"}, b"not gzip")]
    with pytest.raises(OutcomeUnknown) as caught:
        make().send("POST", server.url, key=KEY)
    assert (caught.value.key, caught.value.attempts) == (KEY, 1)
    assert caught.value.__cause__ is not None
    assert len(server.received) == 1


def test_response_hooks(server: Scripted) -> None:
    """The error of a response hook counts as its response; without one, the outcome is unknown."""

    def refuse(response: httpx.Response) -> None:
        raise LookupError

    def send(hook: Any) -> None:
        client = {"event_hooks": {"response": [hook]}}
        Httpx(attempts=1).send("POST", server.url, client=client)

    server.script = [Reply(422), Reply(503), Reply(422)]
    with pytest.raises(httpx.HTTPStatusError):
        send(httpx.Response.raise_for_status)
    with pytest.raises(OutcomeUnknown):
        send(httpx.Response.raise_for_status)
    with pytest.raises(OutcomeUnknown) as caught:
        send(refuse)
    assert isinstance(caught.value.__cause__, LookupError)
