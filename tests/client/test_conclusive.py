"""Which responses hold for all attempts with a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from idempotency_django.client import OutcomeUnknown, key_for
from idempotency_django.contrib.concurrency.errors import IllegalTransition, PreconditionFailed
from idempotency_django.contrib.messaging.errors import SignatureRefused
from idempotency_django.errors import (
    FingerprintMismatch,
    KeyExpired,
    KeyGuessable,
    OperationHeld,
    ResponseNotStored,
)
from idempotency_django.http.responses import error_body

from .drivers import DRIVERS, Driver
from .scripted import CUT, CUT_BODY, Reply, Scripted

KEY = key_for("order", 17)

Make = Callable[..., Driver]


def marked(status: int, marker: str) -> Reply:
    return Reply(status, {"Idempotency-Status": marker})


def problem(error: Any, *, with_marker: bool = True) -> Reply:
    """The response of this package to an error."""
    members = error_body(error)
    headers = {"Content-Type": "application/problem+json"}
    if with_marker:
        headers["Idempotency-Status"] = error.token
    return Reply(members["status"], headers, json.dumps(members).encode())


SUCCESS = [Reply(200), Reply(201), Reply(202), Reply(204, body=b"")]
STORED = [
    *(marked(status, "executed; ttl=86399") for status in (201, 303, 400, 402, 404, 422)),
    marked(200, "executed; stored=?0"),  # a stream
    *(marked(status, "replayed; ttl=9; attempt=1") for status in (201, 302, 400, 404, 500)),
    *(Reply(status, {"Idempotent-Replayed": "true"}) for status in (402, 404, 500)),
]
EXPLAINED = [problem(error()) for error in (FingerprintMismatch, KeyExpired, ResponseNotStored)]
EXPLAINED_IN_BODY = [  # by a server without the header
    problem(error(), with_marker=False) for error in (FingerprintMismatch, ResponseNotStored)
]
OF_OTHERS = [  # of a proxy, an authentication layer, or a server that says nothing
    *(Reply(status) for status in (302, 303, 304, 400, 401, 402, 403, 404, 409, 413, 422)),
    Reply(403, {"Content-Type": "application/problem+json"}, b'{"status": 403}'),
    Reply(403, {"Content-Type": "application/problem+json"}, b'{"state": "not-executed"}'),
    Reply(403, {"Idempotency-Status": "quarantined"}),
]
OF_ONE_ATTEMPT = [
    *(marked(status, "executed; stored=?0") for status in (400, 403, 409)),
    *(problem(error()) for error in (KeyGuessable, OperationHeld)),
    *(problem(error()) for error in (PreconditionFailed, IllegalTransition, SignatureRefused)),
]
HOLDS = [*SUCCESS, *STORED, *EXPLAINED, *EXPLAINED_IN_BODY]
SAYS_NOTHING = [*OF_OTHERS, *OF_ONE_ATTEMPT]
ALL = [*((reply, True) for reply in HOLDS), *((reply, False) for reply in SAYS_NOTHING)]


@pytest.mark.parametrize("first", [CUT_BODY, Reply(503), Reply(504), Reply(408)], ids=str)
def test_after_an_unknown_outcome(server: Scripted, first: Reply | str) -> None:
    """After an attempt whose outcome is unknown, a response is returned only if it holds for it."""
    for reply, holds in ALL:
        check(DRIVERS[0](), server, [first, reply], holds=holds)


@pytest.mark.parametrize("stream", [False, True])
def test_each_client(make: Make, server: Scripted, *, stream: bool) -> None:
    """So it is with each client, also if others come in between, or the caller reads the response
    itself.
    """
    for reply, holds in ALL:
        check(make(), server, [CUT, Reply(429), reply], holds=holds, stream=stream)


def check(
    client: Driver, server: Scripted, script: list[Reply | str], *, holds: bool, **how: Any
) -> None:
    """The client stops with the last reply, and returns it if it holds."""
    server.script, server.received[:] = [*script], []
    error: OutcomeUnknown | None = None
    try:
        response = client.send("POST", server.url, key=KEY, **how)
    except OutcomeUnknown as unknown:
        error, response = unknown, unknown.response
    assert (error is None, response.status_code) == (holds, script[-1].status), script  # type: ignore[union-attr]
    assert (len(server.received), len(set(server.keys))) == (len(script), 1), script
    if error:
        assert (error.key, error.attempts) == (KEY, len(script))
        assert "does not say what became of an earlier attempt" in error.reason
        assert response.is_closed  # type: ignore[union-attr]


def test_only_attempt(make: Make, server: Scripted) -> None:
    """The response to the only attempt is returned as it is."""
    for reply, _ in ALL:
        check(make(), server, [reply], holds=True)


@pytest.mark.parametrize("stream", [False, True])
def test_in_progress(make: Make, server: Scripted, *, stream: bool) -> None:
    """A 202 for a key in progress is not the response: the client asks again until there is one."""
    accepted = Reply(202, {"Idempotency-Status": "in-progress", "Retry-After": "0"})
    final = marked(201, "replayed; ttl=9; attempt=1")
    check(make(attempts=2), server, [CUT, *[accepted] * 4, final], holds=True, stream=stream)

    server.script, server.received[:] = [accepted] * 99, []
    with pytest.raises(OutcomeUnknown) as caught:
        make(deadline=timedelta(0)).send("POST", server.url, key=KEY, stream=stream)
    assert caught.value.response.status_code == 202


NOT_EXECUTED = [
    Reply(425),
    Reply(429),
    Reply(
        409,
        {"Content-Type": "application/problem+json"},
        b'{"state": "not-executed", "retryable": true}',
    ),
]


@pytest.mark.parametrize("first", NOT_EXECUTED, ids=str)
@pytest.mark.parametrize("reply", [Reply(400), Reply(403)], ids=str)
def test_after_nothing_was_executed(
    make: Make, server: Scripted, first: Reply, reply: Reply
) -> None:
    """If the attempts before were not executed, each final response holds."""
    server.script = [first, first, reply]
    assert make().send("POST", server.url).status_code == reply.status


@pytest.mark.parametrize("last", NOT_EXECUTED, ids=str)
def test_the_last_response_of_what_was_not_executed(
    make: Make, server: Scripted, last: Reply
) -> None:
    """If the server says of each attempt that it was not executed, the caller gets its response."""
    server.script = [last]
    assert make(attempts=1).send("POST", server.url).status_code == last.status


def test_other_error_after_a_loss(make: Make, server: Scripted) -> None:
    """An error that no retry mends says nothing of an earlier attempt, either."""
    server.script = [CUT, Reply(201, {"Content-Encoding": "gzip"}, b"not gzip")]
    with pytest.raises(OutcomeUnknown, match="an error that a retry does not mend") as caught:
        make().send("POST", server.url, key=KEY)
    assert caught.value.__cause__ is not None
    assert len(server.received) == 2
