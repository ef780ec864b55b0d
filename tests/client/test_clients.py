"""What each client does: httpx and httpx2, sync and async, and the adapter of requests."""

from __future__ import annotations

import io
import pickle
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
import requests

from idempotency_django.client import IdempotentAdapter, IdempotentClient, OutcomeUnknown, key_for
from tests.servers import free_port

from .drivers import AT_ONCE, AsyncHttpx, Driver, Httpx, Requests
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
        Reply(409, {"Stripe-Should-Retry": "true"}),
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
        Reply(400),
        Reply(409),
        Reply(412),
        Reply(422),
        Reply(422, {"Retry-After": "0"}),
        Reply(500, {"Idempotent-Replayed": "true"}),
        Reply(503, {"Idempotency-Status": "replayed; ttl=86399; attempt=1"}),
        Reply(503, {"Content-Type": "application/problem+json"}, b'{"retryable": false}'),
        Reply(500, {"Stripe-Should-Retry": "false"}),
    ],
    ids=str,
)
def test_final(make: Make, server: Scripted, final: Reply) -> None:
    """A response that would be the same next time is returned at once."""
    server.script = [final]
    assert make().send("POST", server.url, json={}).status_code == final.status
    assert len(server.received) == 1


def test_new_keys(make: Make, server: Scripted) -> None:
    """Two requests have two keys."""
    client = make()
    for _ in range(2):
        client.send("POST", server.url, json={})
    assert len(set(server.keys)) == 2


def test_own_key(make: Make, server: Scripted) -> None:
    """The caller's key is sent, in quotation marks if the client writes the header."""
    make().send("POST", server.url, key=KEY)
    make().send("POST", server.url, headers={"Idempotency-Key": KEY})
    written = KEY if make is Requests else f'"{KEY}"'
    assert server.keys == [written, KEY]


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


@pytest.mark.parametrize("make", [Httpx, AsyncHttpx])
def test_off(make: Make, server: Scripted) -> None:
    """With the key ``None``, a request has no key, and is not retried."""
    server.script = [Reply(503)]
    assert make().send("POST", server.url, key=None).status_code == 503
    assert server.keys == [None]


def test_lost(make: Make, server: Scripted) -> None:
    """If no response arrives, the caller gets the key, and the last error as the cause."""
    server.script = [CUT, CUT, CUT]

    with pytest.raises(OutcomeUnknown, match="at most 3 attempts") as caught:
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


def test_throttled(make: Make, server: Scripted) -> None:
    """A request that was never executed, but throttled each time, gets the last response."""
    server.script = [Reply(429), Reply(429)]
    assert make(attempts=2).send("POST", server.url).status_code == 429


def test_throttled_after_a_loss(make: Make, server: Scripted) -> None:
    """If the first response was lost, a later 429 does not say what happened."""
    server.script = [CUT, Reply(429)]
    with pytest.raises(OutcomeUnknown) as caught:
        make(attempts=2).send("POST", server.url)
    assert caught.value.response.status_code == 429


def test_never_connected(make: Make) -> None:
    """If no attempt reached the server, the error is the library's own, and carries the key."""
    library = make.library  # type: ignore[attr-defined]
    refused = getattr(library, "ConnectError", None) or library.ConnectionError
    with pytest.raises(refused) as caught:
        make(attempts=2).send("POST", f"http://127.0.0.1:{free_port()}", key=KEY)
    assert caught.value.idempotency_key == KEY  # type: ignore[attr-defined]
    assert KEY in caught.value.__notes__[0]


def test_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same if each attempt to connect took too long."""

    def send(*args: Any, **options: Any) -> Any:
        raise requests.ConnectTimeout

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    with pytest.raises(requests.ConnectTimeout):
        Requests(attempts=2).send("POST", "http://pay.example.com/")


def test_timeout(make: Make) -> None:
    """A timeout is a lost response."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        timeout = {"timeout": 0.05}
        with pytest.raises(OutcomeUnknown) as caught:
            make(attempts=2).send("POST", url, **timeout)
    assert "Timeout" in type(caught.value.__cause__).__name__


def test_journal(make: Make, server: Scripted) -> None:
    """The journal sees each attempt before anything of it is sent."""
    noted: list[Any] = []
    server.script = [CUT]
    client = make(journal=lambda *attempt: noted.append((*attempt, len(server.received))))

    client.send("POST", f"{server.url}/charges/?a=1", key=KEY)

    url = f"{server.url}/charges/?a=1"
    assert noted == [(KEY, "POST", url, 1, 0), (KEY, "POST", url, 2, 1)]


def test_journal_fails(make: Make, server: Scripted) -> None:
    """What cannot be noted is not sent."""

    def journal(*attempt: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        make(journal=journal).send("POST", server.url, key=KEY)
    assert caught.value.idempotency_key == KEY  # type: ignore[attr-defined]
    assert server.received == []


def test_async_journal(make: Make, server: Scripted) -> None:
    """The journal of an async client may be async; any other client refuses such a journal."""
    noted = []

    async def journal(*attempt: Any) -> None:
        noted.append(attempt)

    client = make(journal=journal)
    if client.is_async:
        client.send("POST", server.url)
        assert len(noted) == len(server.received) == 1
    else:
        with (
            pytest.raises(TypeError, match="cannot be async"),
            pytest.warns(RuntimeWarning, match="never awaited"),
        ):
            client.send("POST", server.url)
        assert server.received == []


def test_generator(make: Make, server: Scripted) -> None:
    """A body that can be sent only once is refused, before anything is sent."""

    async def later() -> Any:
        yield b"once"

    client = make()
    for body in (later(),) if client.is_async else ((part for part in [b"once"]), io.BytesIO(b"1")):
        with pytest.raises(ValueError, match="can be sent only once"):
            client.send("POST", server.url, content=body)
    assert server.received == []


@pytest.mark.parametrize("make", [Httpx])
def test_generator_without_key(make: Make, server: Scripted) -> None:
    """It is sent if the key is off."""
    make().send("POST", server.url, content=(part for part in [b"once"]), key=None)
    assert len(server.received) == 1


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


@pytest.mark.parametrize("status", [307, 308])
def test_redirect_within_the_origin(make: Make, server: Scripted, status: int) -> None:
    """A redirect within the origin keeps the key, also when it is retried."""
    moved = Reply(status, {"Location": "/elsewhere/"})
    server.script = [moved, CUT, moved, Reply(201)]
    if make is Requests:  # which retries the second request only
        del server.script[2]

    response = make().send("POST", server.url, json={}, key=KEY, redirects=True)

    assert response.status_code == 201
    assert {request.method for request in server.received} == {"POST"}
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("status", [301, 302, 303])
def test_redirect_to_another_origin(make: Make, server: Scripted, status: int) -> None:
    """A redirect to another origin goes there without the key."""
    with scripted() as other:
        server.script = [Reply(status, {"Location": f"{other.url}/page/"})]
        response = make().send("POST", server.url, json={}, key=KEY, redirects=True)
        assert response.status_code == 201
        assert [(request.method, request.key) for request in other.received] == [("GET", None)]


@pytest.mark.parametrize("status", [307, 308])
def test_unsafe_redirect_to_another_origin(make: Make, server: Scripted, status: int) -> None:
    """An unsafe request does not follow a redirect to another origin: it would have no key."""
    with scripted() as other:
        server.script = [Reply(status, {"Location": f"{other.url}/charges/"})]
        with pytest.raises(ValueError, match="redirected to another origin") as caught:
            make().send("POST", server.url, json={}, key=KEY, redirects=True)
        assert caught.value.idempotency_key == KEY  # type: ignore[attr-defined]
        assert other.received == []


@pytest.mark.parametrize("status", [301, 302, 303])
def test_lost_after_a_redirect(make: Make, server: Scripted, status: int) -> None:
    """If the page after a POST cannot be reached, the POST was sent nevertheless."""
    away = Reply(status, {"Location": f"http://127.0.0.1:{free_port()}/"})
    server.script = [away, away]
    with pytest.raises(OutcomeUnknown) as caught:
        make(attempts=2).send("POST", server.url, key=KEY, redirects=True)
    assert (caught.value.key, caught.value.idempotency_key) == (KEY, KEY)
    assert caught.value.__cause__ is not None
    # The session of requests follows redirects itself, so the adapter cannot repeat the POST.
    assert len(server.received) == caught.value.attempts == (1 if make is Requests else 2)


@pytest.mark.parametrize("status", [429, 503])
def test_throttled_after_a_redirect(make: Make, server: Scripted, status: int) -> None:
    """If the page after a POST is refused, the POST was executed nevertheless."""
    server.script = [Reply(303, {"Location": "/page/"}), Reply(status)]
    with pytest.raises(OutcomeUnknown) as caught:
        make(attempts=1).send("POST", server.url, redirects=True)
    assert caught.value.response.status_code == status
    assert [request.method for request in server.received] == ["POST", "GET"]


def test_page_after_a_redirect(make: Make, server: Scripted) -> None:
    """The page is a GET without the key, also within the origin; any page is returned."""
    for page in (Reply(200), Reply(404)):
        server.script = [Reply(303, {"Location": "/page/"}), page]
        server.received[:] = []
        response = make().send("POST", server.url, key=KEY, redirects=True)
        assert response.status_code == page.status
        assert [bool(request.key) for request in server.received] == [True, False]
        assert response.history[0].request.headers["Idempotency-Key"]


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_moved_permanently(make: Make, server: Scripted, method: str) -> None:
    """A 301 makes a GET of a POST only: other methods keep theirs, and so the key."""
    server.script = [Reply(301, {"Location": "/elsewhere/"})]
    make().send(method, server.url, key=KEY, redirects=True)
    assert [request.method for request in server.received] == [method, method]
    assert len(set(server.keys)) == 1
    with scripted() as other:
        server.script = [Reply(301, {"Location": f"{other.url}/charges/"})]
        with pytest.raises(ValueError, match="redirected to another origin"):
            make().send(method, server.url, key=KEY, redirects=True)
        assert other.received == []


@pytest.mark.parametrize("status", [307, 308])
def test_redirect_after_a_loss(make: Make, server: Scripted, status: int) -> None:
    """A redirect does not say what became of an earlier attempt. httpx follows it with the same
    key; the adapter of requests cannot know whether the session will, and stops.
    """
    server.script = [CUT, Reply(status, {"Location": "/elsewhere/"}), Reply(201)]
    if make is Requests:
        with pytest.raises(OutcomeUnknown) as caught:
            make().send("POST", server.url, redirects=True)
        assert caught.value.response.status_code == status
    else:
        assert make().send("POST", server.url, redirects=True).status_code == 201
        assert len(set(server.keys)) == 1
        assert len(server.received) == 3


def test_redirect_to_another_origin_after_a_loss(make: Make, server: Scripted) -> None:
    """Nor does one that is refused, so the caller must not begin anew at the other address."""
    with scripted() as other:
        server.script = [CUT, Reply(307, {"Location": f"{other.url}/charges/"})]
        with pytest.raises(OutcomeUnknown):
            make().send("POST", server.url, redirects=True)
        assert other.received == []


def test_prepared_request_keeps_its_key(server: Scripted) -> None:
    """A prepared request can be sent again after a redirect within the origin: it has its key.
    A response can be pickled with its request.
    """
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", IdempotentAdapter())
        prepared = session.prepare_request(requests.Request("POST", server.url))
        for _ in range(2):
            server.script = [Reply(303, {"Location": "/page/"})]
            response = session.send(prepared)
    assert pickle.loads(pickle.dumps(response)).status_code == 201
    assert server.keys[0] == server.keys[2]
    assert server.keys[1] is server.keys[3] is None


def test_pickled_session(server: Scripted) -> None:
    """A session can be pickled with its adapter, whose copy retries in the same way, with a budget
    of its own.
    """
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", IdempotentAdapter(backoff=AT_ONCE, attempts=2))
        copy = pickle.loads(pickle.dumps(session))
    server.script = [CUT, CUT, CUT]
    with copy, pytest.raises(OutcomeUnknown, match="at most 2 attempts"):
        copy.post(server.url)
    assert len(set(server.keys)) == 1


def test_digest(make: Make, server: Scripted) -> None:
    """Both requests of digest authentication have the same key, and so do their retries."""
    challenge = Reply(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    server.script = [challenge, CUT]
    if make is not Requests:  # which retries the second request only
        server.script.append(challenge)
    client = make()
    response = client.send("POST", server.url, auth=client.digest(), key=KEY)  # type: ignore[attr-defined]
    assert response.status_code == 201
    assert len(set(server.keys)) == 1
    assert len(server.received) >= 3


def test_stream(make: Make, server: Scripted) -> None:
    """A streamed response is retried by its status, and by its problem, which is read for that."""
    problem = Reply(409, {"Content-Type": "application/problem+json"}, b'{"retryable": true}')
    server.script = [Reply(503), problem, Reply(201, body=b'{"id": 1}')]
    response = make().send("POST", server.url, stream=True)
    assert (response.json(), len(set(server.keys))) == ({"id": 1}, 1)


UNDECODABLE = Reply(201, {"Content-Encoding": "gzip"}, b"not gzip")
UNFOLLOWABLE = ["/", "ftp://127.0.0.1/", "http://[bad"]


def check_unknown(client: Driver, server: Scripted, **how: Any) -> OutcomeUnknown:
    """The outcome is unknown after one attempt, because of another error."""
    with pytest.raises(OutcomeUnknown) as caught:
        client.send("POST", server.url, key=KEY, **how)
    assert (caught.value.key, caught.value.attempts) == (KEY, 1)
    assert caught.value.__cause__ is not None
    assert [each.method for each in server.received].count("POST") == 1
    return caught.value


def test_undecodable(make: Make, server: Scripted) -> None:
    """If the response cannot be decoded, the request was executed nevertheless. No retry mends
    that.
    """
    server.script = [UNDECODABLE]
    check_unknown(make(), server)


def test_undecodable_page(make: Make, server: Scripted) -> None:
    """The same for the page after a redirect."""
    server.script = [Reply(303, {"Location": "/page/"}), UNDECODABLE]
    check_unknown(make(), server, redirects=True)


@pytest.mark.parametrize("address", UNFOLLOWABLE)
def test_unfollowable_redirect(make: Make, server: Scripted, address: str) -> None:
    """If a redirect cannot be followed, the request was executed nevertheless. The session of
    requests raises its own error if there are too many, or no adapter is mounted for an address.
    """
    server.script = [Reply(302, {"Location": address})] * 40
    if make is Requests and address != "http://[bad":
        with pytest.raises((requests.TooManyRedirects, requests.exceptions.InvalidSchema)):
            make().send("POST", server.url, redirects=True)
    else:
        check_unknown(make(attempts=1), server, redirects=True)


def test_journal_fails_later(make: Make, server: Scripted) -> None:
    """If the second attempt cannot be noted, it is not sent. The first one was."""

    def journal(key: str, method: str, url: str, attempt: int) -> None:
        if attempt == 2:
            raise OSError("disk full")

    server.script = [CUT]
    with pytest.raises(OutcomeUnknown) as caught:
        make(journal=journal).send("POST", server.url, key=KEY)
    assert str(caught.value.__cause__) == "disk full"
    assert len(server.received) == 1


def test_never_sent(make: Make, server: Scripted) -> None:
    """An error from before anything was sent is the library's or the program's own."""

    def auth(request: Any) -> Any:
        raise KeyError("token")

    for how, url in (({"auth": auth}, server.url), ({}, "ftp://127.0.0.1/")):
        with pytest.raises(Exception, match=r"token|ftp") as caught:
            make().send("POST", url, **how)
        assert not isinstance(caught.value, OutcomeUnknown)
    assert server.received == []


def test_never_sent_by_the_adapter() -> None:
    """So is one that the adapter of requests itself raises."""
    with pytest.raises(ValueError, match="Timeout"):
        Requests().send("POST", "http://127.0.0.1:1/", timeout="soon")


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


def test_hooks_are_kept(server: Scripted) -> None:
    """A client's own hooks run, also those that are set later."""
    seen = []
    with IdempotentClient(trust_env=False, event_hooks={"request": [seen.append]}) as client:
        for _ in range(2):
            client.post(server.url)
        assert len(client.event_hooks["request"]) == 2
        client.event_hooks = {"request": [seen.append]}
        with scripted() as other:
            server.script = [Reply(303, {"Location": other.url})]
            client.post(server.url, follow_redirects=True)
            assert other.keys == [None]
    assert len(seen) == 4


def other_key(request: Any) -> Any:
    request.headers["Idempotency-Key"] = str(uuid.uuid4())
    return request


def test_key_of_an_auth(make: Make, server: Scripted) -> None:
    """All attempts send one key, also if an auth sets it. httpx asks the auth in each attempt, so
    its clients refuse that before anything is sent; requests asks it only once.
    """
    server.script = [CUT]
    if make is Requests:
        make().send("POST", server.url, auth=other_key)
        assert (len(server.keys), len(set(server.keys))) == (2, 1)
    else:
        with pytest.raises(ValueError, match="auth has changed the header Idempotency-Key of POST"):
            make().send("POST", server.url, auth=other_key)
        assert server.received == []


def test_key_of_a_hook(server: Scripted) -> None:
    """So they do with a request hook, also one that was added later."""
    with IdempotentClient(trust_env=False) as client:
        client.post(server.url)
        client.event_hooks["request"].append(other_key)
        with pytest.raises(ValueError, match="pass it as idempotency_key"):
            client.post(server.url)
        client.post(server.url, extensions={"idempotency_key": None})
    assert len(server.received) == 2


def test_lifetime(make: Make, server: Scripted) -> None:
    """A key is not sent again after its lifetime."""
    server.script = [Reply(503, {"Retry-After": "2"})]
    with pytest.raises(OutcomeUnknown, match="lifetime is 2 seconds"):
        make(lifetime=timedelta(seconds=2)).send("POST", server.url)
    assert len(server.received) == 1


def test_unknown_option(make: Make) -> None:
    """A misspelled option is an error."""
    with pytest.raises(TypeError, match="lifetme"):
        make(lifetme=timedelta(1)).send("POST", "http://127.0.0.1:1")


def test_httpx_is_used(server: Scripted) -> None:
    """An ``IdempotentClient`` is an ``httpx.Client``, with all of its methods."""
    with IdempotentClient(base_url=server.url, trust_env=False) as client:
        assert isinstance(client, httpx.Client)
        client.put("/charges/17/", json={})
    assert server.received[0].path == "/charges/17/"
