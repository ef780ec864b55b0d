"""What is retried, when, and how long; no request is sent here."""

from __future__ import annotations

import pickle
import random
import re
import time
import uuid
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
import requests

from idempotency_django.backoff import Backoff, retry_after
from idempotency_django.client import (
    Call,
    OutcomeUnknown,
    Retries,
    RetryBudget,
    is_retryable,
    key_for,
)

URL = "https://shop.example.com/charges/?a=1"


def call(**options: Any) -> Call:
    return Call(Retries(**options), '"order-17"')


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each random wait is the longest that it can be."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    clock = {"time": 0.0}
    monkeypatch.setattr(time, "time", lambda: clock["time"])
    return clock


@pytest.mark.parametrize(
    "error",
    [
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("cut"),
        TimeoutError(),
        OutcomeUnknown("key", 3),
        httpx.HTTPStatusError("", request=httpx.Request("POST", URL), response=httpx.Response(503)),
    ],
    ids=repr,
)
def test_retryable_errors(error: Exception) -> None:
    """A lost response is worth another attempt with the same key."""
    assert is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        httpx.UnsupportedProtocol("ftp"),
        httpx.TooManyRedirects("20"),
        httpx.HTTPStatusError("", request=httpx.Request("POST", URL), response=httpx.Response(422)),
        ValueError("?"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors(error: object) -> None:
    """Anything else is not."""
    assert not is_retryable(error)


def test_requests_status_error() -> None:
    """The error of ``raise_for_status()`` counts by its response, also if that is false."""
    response = requests.Response()
    for status, expected in ((503, True), (400, False)):
        response.status_code, response._content = status, b""
        with pytest.raises(requests.HTTPError) as caught:
            response.raise_for_status()
        assert is_retryable(caught.value) is expected


def test_waits(longest: None) -> None:
    """Waits are random, up to a limit that doubles after each attempt."""
    one = call(backoff=Backoff(timedelta(seconds=1), timedelta(seconds=5)))
    waits = []
    for _ in range(5):
        one.begin()
        waits.append(one.received(httpx.Response(503)))
    assert waits == [1, 2, 4, 5, 5]


def test_retry_after(longest: None) -> None:
    """The server's wait comes before the random one, whether in seconds or as a date.

    Whatever a server writes into the header, there is a wait.
    """
    at_once = Backoff(timedelta(seconds=1), timedelta(seconds=1))
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    for value, low, high in (("3", 4, 4), (soon, 18, 21), ("soon", 1, 1), ("-5", 1, 1)):
        one = call(backoff=at_once)
        one.begin()
        wait = one.received(httpx.Response(429, headers={"Retry-After": value}))
        assert wait is not None
        assert low <= wait <= high
    for odd in ("", "9" * 30, "Sun, 06 Nov 1994", "Infinity"):
        assert timedelta(0) <= retry_after(odd) <= timedelta(days=20_000)


def test_deadline(clock: dict[str, float], longest: None) -> None:
    """Where the next attempt would begin after the deadline, the client gives up at once."""
    backoff = Backoff(timedelta(seconds=30), timedelta(seconds=30))
    one = call(deadline=timedelta(minutes=1), backoff=backoff)
    one.begin()
    assert one.received(httpx.Response(503)) == 30
    clock["time"] = 30
    one.begin()
    assert one.received(httpx.Response(503)) == 30
    clock["time"] = 31
    with pytest.raises(OutcomeUnknown, match="the deadline is 60 seconds"):
        one.received(httpx.Response(503))


def test_suspended(clock: dict[str, float]) -> None:
    """After a wait that lasted longer, such as in a suspended laptop, no key is sent again."""
    one = call()
    one.begin()
    assert one.failed(ConnectionError()) is not None
    clock["time"] = 25 * 60 * 60
    with pytest.raises(OutcomeUnknown, match="the deadline is over"):
        one.begin()
    assert one.attempts == 1


IN_PROGRESS = httpx.Response(409, headers={"Retry-After": "1"})


def seconds_of(one: Call, clock: dict[str, float], response: httpx.Response) -> float:
    """When the last attempt began, if each gets the response."""
    while True:
        one.begin()
        began = clock["time"]
        try:
            wait = one.received(response)
        except OutcomeUnknown:
            return began
        assert wait is not None
        clock["time"] += wait


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_lease_is_outlived(
    share: float, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, a client waits for longer than an interrupted request's lease of 30 seconds."""
    monkeypatch.setattr(random, "uniform", lambda low, high: low + share * (high - low))
    one = call()
    one.begin()
    assert one.failed(ConnectionError()) is not None
    assert seconds_of(one, clock, IN_PROGRESS) > 30


def test_in_progress_uses_up_no_attempt(longest: None, clock: dict[str, float]) -> None:
    """Only other failures count as attempts; ``attempts=1`` means no retry at all."""
    one = call(attempts=2, deadline=timedelta(hours=1))
    for _ in range(20):
        one.begin()
        assert one.received(IN_PROGRESS) is not None
    one.begin()
    assert one.received(httpx.Response(503)) is not None
    one.begin()
    with pytest.raises(OutcomeUnknown, match="the limit is attempts=2"):
        one.received(httpx.Response(503))
    single = call(attempts=1)
    single.begin()
    with pytest.raises(OutcomeUnknown, match="the limit is attempts=1"):
        single.received(IN_PROGRESS)


def test_in_progress_is_bounded_by_the_budget(longest: None, clock: dict[str, float]) -> None:
    """However long the deadline is, the budget ends the retries of a request in progress."""
    one = call(deadline=timedelta(days=300), budget=RetryBudget(50))
    seconds_of(one, clock, IN_PROGRESS)
    one.begin()
    with pytest.raises(OutcomeUnknown, match="the retry budget is used up") as caught:
        one.received(IN_PROGRESS)
    assert caught.value.attempts == 50 // 10 + 2


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("deadline", 5, "Pass a timedelta: timedelta(minutes=1)."),
        ("budget", 5, "Pass a RetryBudget: RetryBudget(500)."),
        ("attempts", "3", "Pass an int: 6."),
    ],
)
def test_wrong_types(name: str, value: Any, advice: str) -> None:
    """A wrong setting is refused before anything is sent, with an example that fits."""
    with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}. {advice}")):
        Retries(**{name: value})


def test_wait_that_is_no_duration() -> None:
    """A backoff of plain numbers is refused where it is made, and not after a request was sent."""
    with pytest.raises(TypeError, match=r"a wait that is not a timedelta\. Pass two timedeltas"):
        Backoff(first=5, longest=timedelta(seconds=20))  # type: ignore[arg-type]


def test_no_attempt() -> None:
    """Settings that allow no attempt, or that seem to allow retries, are refused."""
    with pytest.raises(ValueError, match=r"attempts is 0\. Pass 1 for no retry, or more\."):
        Retries(attempts=0)
    with pytest.raises(ValueError, match="A RetryBudget of 9 allows no retry, as each takes 10"):
        RetryBudget(9)


def exhausted_by(budget: RetryBudget, response: httpx.Response) -> int:
    """How many retries a budget allows."""
    retries = 0
    while True:
        one = call(budget=budget)
        one.begin()
        try:
            if one.received(response) is None:
                return retries
        except OutcomeUnknown:
            return retries
        retries += 1


@pytest.mark.parametrize("status", [503, 429])
def test_budget(status: int) -> None:
    """The retries of all calls come out of one budget."""
    assert exhausted_by(RetryBudget(), httpx.Response(status)) == 500 // 10


def test_budget_is_refilled() -> None:
    """A final response puts a token back, but no more than there were at first."""
    budget = RetryBudget(20)
    for _ in range(100):
        call(budget=budget).received(httpx.Response(201))
    assert exhausted_by(budget, httpx.Response(503)) == 2
    for _ in range(9):
        call(budget=budget).received(httpx.Response(201))
    assert exhausted_by(budget, httpx.Response(503)) == 0
    call(budget=budget).received(httpx.Response(422))
    assert exhausted_by(budget, httpx.Response(503)) == 1


def test_key_for() -> None:
    """The same parts give the same key in each process and each version; others do not."""
    assert key_for("order", 17) == "6234f8ae-7a93-5cc8-b368-1fbd19dadf53"
    assert key_for("order", 17) == key_for("order", "17")
    assert key_for("order", 17) != key_for("order1", 7) != key_for("order", 1, 7)
    order = uuid.uuid4()
    assert key_for(order) == key_for(str(order))
    assert uuid.UUID(key_for("ü")).version == 5


@pytest.mark.parametrize("part", [1.0, True, None, b"17", datetime.now(UTC)])
def test_no_part(part: Any) -> None:
    """A value whose text could change cannot be part of a key."""
    with pytest.raises(TypeError, match="cannot be part of a key"):
        key_for("order", part)


def test_outcome_unknown() -> None:
    """The error says what to do, and can be sent to another process."""
    error = OutcomeUnknown("order-17", 3, "the retry budget is used up", httpx.Response(503))
    copy = pickle.loads(pickle.dumps(error))
    for one in (error, copy):
        assert str(one) == (
            "The outcome is unknown after attempt 3: the retry budget is used up. The last "
            "response was <Response [503 Service Unavailable]>. The operation may have been "
            "executed. Retry later with the same key, 'order-17', or look up what happened. A new "
            "key could execute the operation twice."
        )
    assert (copy.key, copy.attempts, copy.response.status_code) == ("order-17", 3, 503)
