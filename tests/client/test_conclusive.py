"""Which responses hold for all attempts with a key, in Python and in the example in JavaScript."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from idempotency_django.client import OutcomeUnknown, key_for
from idempotency_django.errors import (
    AnswerNotAcceptable,
    FingerprintMismatch,
    IllegalTransition,
    KeyGuessable,
    KeyTooOld,
    OperationHeld,
    PreconditionFailed,
    ResponseExpired,
    ResponseNotStored,
    SignatureRefused,
)
from idempotency_django.http.marking import refused
from idempotency_django.http.messages import problem_of

from .drivers import DRIVERS, Driver
from .scripted import CUT, CUT_BODY, Reply, Scripted, scripted

KEY = key_for("order", 17)
PAGE = Path(__file__).parents[2] / "docs/requests/clients.md"

Make = Callable[..., Driver]


def marked(status: int, marker: str) -> Reply:
    return Reply(status, {"Idempotency-Status": marker})


def problem(error: Any, *, with_marker: bool = True) -> Reply:
    """The response of this package to an error."""
    members = problem_of(error)
    headers = {"Content-Type": "application/problem+json"}
    if with_marker:
        headers["Idempotency-Status"] = refused(error)
    return Reply(members["status"], headers, json.dumps(members).encode())


SUCCESS = [Reply(200), Reply(201), Reply(202), Reply(204, body=b"")]
STORED = [
    *(marked(status, "executed; ttl=86399") for status in (201, 303, 400, 402, 404, 422)),
    marked(200, "executed; stored=?0"),  # a stream
    *(marked(status, "replayed; ttl=9; attempt=1") for status in (201, 302, 400, 404, 500)),
    *(Reply(status, {"Idempotent-Replayed": "true"}) for status in (402, 404, 500)),
]
EXPLAINED = [
    problem(error()) for error in (FingerprintMismatch, ResponseExpired, ResponseNotStored)
] + [problem(AnswerNotAcceptable())]
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
    *(marked(status, "ignored") for status in (200, 201, 403, 404, 503)),
    *(problem(error()) for error in (KeyGuessable, KeyTooOld, OperationHeld)),
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
        assert getattr(response, "is_closed", True)  # requests has no such attribute


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


def test_the_last_response_of_what_was_not_executed(make: Make, server: Scripted) -> None:
    """If the server says of each attempt that it was not executed, the caller gets its response."""
    server.script = [NOT_EXECUTED[2]]
    assert make(attempts=1).send("POST", server.url).status_code == 409


@pytest.mark.parametrize(
    ("headers", "holds"), [({}, False), ({"Idempotency-Status": "replayed"}, True)], ids=str
)
def test_page_after_a_loss(
    make: Make, server: Scripted, headers: dict[str, str], *, holds: bool
) -> None:
    """A page after a redirect says nothing of the request, such as that of a login; only the
    redirect can.
    """
    server.script = [CUT, Reply(302, {"Location": "/page/", **headers}), Reply(200)]
    if holds:
        assert make().send("POST", server.url, redirects=True).status_code == 200
    else:
        with pytest.raises(OutcomeUnknown, match="does not say what became of an"):
            make().send("POST", server.url, redirects=True)


def test_other_error_after_a_loss(make: Make, server: Scripted) -> None:
    """An error that no retry mends says nothing of an earlier attempt, either."""
    server.script = [CUT, Reply(201, {"Content-Encoding": "gzip"}, b"not gzip")]
    with pytest.raises(OutcomeUnknown, match="an error that a retry does not mend") as caught:
        make().send("POST", server.url, key=KEY)
    assert caught.value.__cause__ is not None
    assert len(server.received) == 2


# The example in JavaScript.

REDIRECTS = {302, 303}  # which fetch() makes errors of, without their headers
IN_BROWSERS = [case for case in ALL if case[0].status not in REDIRECTS]

RUN = """
const stored = new Map();
Object.defineProperty(globalThis, "localStorage", {value: {
  getItem: (name) => stored.get(name) ?? null,
  setItem: (name, value) => stored.set(name, value),
  removeItem: (name) => stored.delete(name),
}});
Math.random = () => 0;
const send_ = globalThis.fetch;
globalThis.fetch = (path, options) => send_(SERVER + path, options);
const outcomes = [];
for (let order = 0; order < ORDERS; order++) {
  const outcome = await createCharge(order, 500).then(
    (response) => ["returned", response.status],
    (error) => ["thrown", error.cause?.status ?? null],
  );
  outcomes.push([...outcome, stored.size]);
  stored.clear();
}
console.log(JSON.stringify(outcomes));
"""


def run_javascript(server: Scripted, orders: int) -> list[list[Any]]:
    """How each order ends: what createCharge() does, the status, and the number of keys kept."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("There is no node.")
    [source] = re.findall(r"```\{code-block\} javascript\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = f'const SERVER = "{server.url}", ORDERS = {orders};\n{source}{RUN}'
    ran = subprocess.run(
        [node, "--input-type=module"], input=program, capture_output=True, text=True, check=True
    )
    outcomes: list[list[Any]] = json.loads(ran.stdout)
    return outcomes


def test_javascript(server: Scripted) -> None:
    """The example returns the same responses as the clients, and otherwise keeps the key."""
    cases = [case for case in IN_BROWSERS if case[0] not in EXPLAINED_IN_BODY]
    for reply, _ in cases:
        server.script += [CUT, reply]
    outcomes = run_javascript(server, len(cases))
    for (reply, holds), outcome in zip(cases, outcomes, strict=True):
        expected = ["returned", reply.status, 0] if holds else ["thrown", reply.status, 1]
        assert outcome == expected, reply
    for first, second in zip(server.keys[::2], server.keys[1::2], strict=True):
        assert first == second


def test_javascript_only_attempt(server: Scripted) -> None:
    """It returns the response to the only attempt, and the next operation has another key."""
    server.script = [reply for reply, _ in IN_BROWSERS]
    outcomes = run_javascript(server, len(IN_BROWSERS))
    assert outcomes == [["returned", reply.status, 0] for reply, _ in IN_BROWSERS]
    assert len(set(server.keys)) == len(server.received) == len(IN_BROWSERS)


def test_javascript_not_executed(server: Scripted) -> None:
    """What was refused because of too many requests, and then otherwise, was not executed."""
    server.script = [Reply(429), Reply(425), Reply(403)]
    assert run_javascript(server, 1) == [["returned", 403, 0]]


def test_javascript_waits_no_longer_than_its_deadline(server: Scripted) -> None:
    """If the server asks for more time, the example stops, and keeps the key."""
    soon = {"Retry-After": "86400"}
    server.script = [Reply(503, soon), Reply(429, soon)]
    assert run_javascript(server, 2) == [["thrown", 503, 1], ["returned", 429, 1]]
    assert len(server.received) == 2


@pytest.mark.parametrize("status", [302, 307])
def test_javascript_redirects(server: Scripted, status: int) -> None:
    """The example follows no redirect: neither the page nor another host gets the key."""
    with scripted() as other:
        away = Reply(status, {"Location": f"{other.url}/login/"})
        server.script = [away, Reply(403)]
        assert run_javascript(server, 1) == [["thrown", 403, 1]]
        assert other.received == []
