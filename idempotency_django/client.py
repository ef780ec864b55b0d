"""Clients of httpx that retry with the same key: the extra ``[client]``. They need no Django.

A :class:`Call` is one logical operation: when it is sent again, and when it stops. Its client tells
it about each attempt, and gets the seconds to wait before the next one.

The clients are no transports: a transport does not notice that the connection is lost while the
response is read.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, Final

import idempotency_django

from .backoff import Backoff, retry_after
from .lazy import extra

with extra("client"):
    import anyio
    import httpx

__all__ = [
    "AsyncIdempotentClient",
    "IdempotentClient",
    "OutcomeUnknown",
    "RetryBudget",
    "is_retryable",
    "key_for",
]

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})

_KEY: Final = re.compile(r"[!#-+\--\[\]-~]{1,255}")  # no comma, no quotation mark, no backslash
_NOT_EXECUTED: Final = frozenset({425, 429})
_SETTLED: Final = frozenset({"replayed", "not-replayed", "expired", "mismatch"})
_SUCCESS: Final = range(200, 300)
_IN_PROGRESS: Final = 409
_RETRIED: Final = frozenset({408, _IN_PROGRESS, *_NOT_EXECUTED})
_SERVER_ERRORS: Final = 500
_COST: Final = 10
"""The tokens of a retry."""
_EXTENSION: Final = "idempotency_key"
_NOT_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
)
_LOST: Final = (httpx.TransportError, ConnectionError, TimeoutError)
_MISUSED: Final = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
_ERRORS: Final = 400
_BACKOFF: Final = Backoff(first=timedelta(milliseconds=500), longest=timedelta(seconds=20))
_NAMESPACE: Final = uuid.UUID("9f4c2c1e-7c8e-5d0b-9b57-3f1d3a2f8f6a")
_ENGINE: Final = "idempotency_django.engine"


class OutcomeUnknown(Exception):
    """The client stopped, and the operation may or may not have been executed.

    Retry later with the same key, or look up what happened. A new key could execute the operation
    twice. The error of the last attempt is ``__cause__``.

    Attributes:
        key: the key of all attempts.
        attempts: how many attempts were made.
        reason: why there was no further attempt.
        response: the response to the last attempt, which does not say what became of all attempts;
            ``None``: there was none.
    """

    def __init__(self, key: str, attempts: int, reason: str = "", response: Any = None) -> None:
        super().__init__(key, attempts, reason, response)
        self.key = self.idempotency_key = key
        self.attempts = attempts
        self.reason = reason
        self.response = response

    def __str__(self) -> str:
        last = "" if self.response is None else f" The last response was {self.response}."
        return (
            f"The outcome is unknown after attempt {self.attempts}: {self.reason}.{last} The "
            f"operation may have been executed. Retry later with the same key, {self.key!r}, or "
            "look up what happened. A new key could execute the operation twice."
        )


def key_for(*parts: str | int | uuid.UUID) -> str:
    """A key made of what the operation is: the same parts always give the same key.

    A task that is retried thus sends the same key, also from another machine. Who knows the parts
    knows the key, so an API for anonymous callers needs a random key instead.

    Args:
        parts: what names the operation, such as ``"order", 17``. Numbers and UUIDs count as text.

    Returns:
        A UUID (RFC 9562, version 5).
    """
    if not parts:
        raise ValueError('key_for() needs the parts of the key, such as key_for("order", 17).')
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | uuid.UUID):
            raise TypeError(
                f"{part!r} cannot be part of a key, because its text could differ between "
                "attempts. Pass a str, an int or a UUID."
            )
    return str(uuid.uuid5(_NAMESPACE, "".join(f"{len(str(part))}:{part}" for part in parts)))


class RetryBudget:
    """Limits the retries of all calls together, so that an outage is not made worse.

    A retry takes 10 tokens, and a final response puts back 1, so that in the long run one of ten
    calls can be retried. Clients and threads can share a budget.

    Args:
        tokens: how many there are at first, and at most; 10 or more.
    """

    def __init__(self, tokens: int = 500) -> None:
        if tokens < _COST:
            raise ValueError(f"A RetryBudget of {tokens} allows no retry, as each takes {_COST}.")
        self._most = self._left = tokens
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the tokens of a retry; ``False``: there are too few, so there must be no retry."""
        with self._lock:
            if self._left < _COST:
                return False
            self._left -= _COST
            return True

    def put_back(self) -> None:
        """Put a token back after a final response."""
        with self._lock:
            self._left = min(self._left + 1, self._most)


def is_retryable(outcome: Any) -> bool:
    """Whether it makes sense to send the same request again, with the same key.

    It does after a lost connection, a timeout, 408, 425, 429, any status from 500, a 409 with
    ``Retry-After``, and a 202 that says that the key is in progress. In a problem, the member
    ``retryable`` decides instead. A replay is always final.

    Args:
        outcome: an exception of httpx, or the response of any library that has ``status_code`` and
            ``headers``.
    """
    if isinstance(outcome, OutcomeUnknown):
        return True
    response = outcome
    if isinstance(outcome, BaseException):
        response = getattr(outcome, "response", None)
        if response is None:
            return isinstance(outcome, _LOST) and not isinstance(outcome, _MISUSED)
    status, headers = response.status_code, response.headers
    marker = _marker(headers)
    if status in _SUCCESS:
        return marker == "in-progress"
    if marker == "replayed" or not (status in _RETRIED or status >= _SERVER_ERRORS):
        return False
    advice = _problem(response).get("retryable")
    if isinstance(advice, bool):
        return advice
    return status != _IN_PROGRESS or "Retry-After" in headers


def _is_conclusive(response: Any) -> bool:
    """Whether a response holds for all attempts with its key, also for those without a response.

    A proxy or an authentication layer judges one request, and does not know the others. So does a
    server that refuses a key, or does not store the response.
    """
    marker = _marker(response.headers)
    if marker in _SETTLED or response.status_code in _SUCCESS:
        return True
    if marker == "executed":
        return "stored=?0" not in response.headers["Idempotency-Status"]
    problem = _problem(response)
    return problem.get("state") == "executed" or problem.get("code") == "mismatch"


def _marker(headers: Mapping[str, str]) -> str:
    """The status of the key in a response, such as ``"replayed"``; empty: none."""
    if headers.get("Idempotent-Replayed", "").lower() == "true":
        return "replayed"
    return headers.get("Idempotency-Status", "").partition(";")[0].strip()


def _problem(response: Any) -> dict[str, Any]:
    """The members of a problem (RFC 9457)."""
    if "problem+json" not in response.headers.get("Content-Type", ""):
        return {}
    try:
        members = json.loads(response.content)
    except (ValueError, RuntimeError):  # not JSON; or a stream that was not read
        return {}
    return members if isinstance(members, dict) else {}


_WANTED: Final[dict[str, tuple[type, str]]] = {
    "attempts": (int, "an int: 6"),
    "deadline": (timedelta, "a timedelta: timedelta(minutes=1)"),
    "backoff": (
        Backoff,
        "a Backoff: Backoff(first=timedelta(seconds=1), longest=timedelta(seconds=20))",
    ),
    "budget": (RetryBudget, "a RetryBudget: RetryBudget(500)"),
}
"""What a setting must be, and an example."""


@dataclass(kw_only=True, eq=False)
class Retries:
    """The settings of a client's retries. Each field is a keyword argument of the clients.

    Attributes:
        attempts: the largest number of attempts, including the first. A retry of a request that is
            in progress (409 or 202) doesn't count, since the server may find out only after a lease
            that an attempt was interrupted. 1: there is no retry.
        deadline: no attempt begins later than this after the first. It must be shorter than the
            server keeps a response, as a later attempt could be executed again.
        backoff: the longest wait after each attempt; waits are random, up to that.
        budget: limits the retries of all calls of this client together.
        header: the name of the key's header.
        quoted: whether keys are sent as a String of RFC 9651, in quotation marks. A header that
            you set yourself is sent as it is.
    """

    attempts: int = 6
    deadline: timedelta = timedelta(minutes=1)
    backoff: Backoff = _BACKOFF
    budget: RetryBudget = field(default_factory=RetryBudget)
    header: str = "Idempotency-Key"
    quoted: bool = True

    def __post_init__(self) -> None:
        for name, (kind, example) in _WANTED.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r}. Pass {example}.")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}. Pass 1 for no retry, or more.")

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Retries:
        """Those fields that are among the options, which are removed from them."""
        names = {each.name for each in fields(cls)} & options.keys()
        return cls(**{name: options.pop(name) for name in names})

    def header_value(self, key: object) -> str:
        """The value of the header for a key.

        Raises:
            ValueError: no header can have the key.
        """
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(
                f"{key!r} is not a valid idempotency key. Use a str of 1-255 visible ASCII "
                "characters, without commas, quotation marks and backslashes, such as a UUID."
            )
        return f'"{key}"' if self.quoted else key


def _new_key(method: str, url: httpx.URL) -> str:
    """A key for a request that has none.

    Within an execution it is derived from the execution, so that each attempt at the execution
    sends the same key. The query is left out, as it may differ between attempts. It is better to be
    refused for using a key twice than to execute something twice.
    """
    if _ENGINE in sys.modules:  # otherwise no handler runs, and Django may not be installed
        execution = idempotency_django.current_execution()
        if execution is not None:
            return execution.key_of_call(f"{method} {_shown(url)}")
    return str(uuid.uuid4())


def _shown(url: httpx.URL) -> str:
    """The URL without what is confidential in it, or may differ between attempts."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


class Call:
    """One logical operation, and the attempts at it.

    Args:
        retries: how its client retries.
        value: the value of its key header.

    Attributes:
        attempts: how many attempts have begun.
    """

    def __init__(self, retries: Retries, value: str) -> None:
        self.key = value.strip().removeprefix('"').removesuffix('"')
        self._retries = retries
        self.attempts = 0
        self._in_progress = 0  # those that found the operation in progress
        self._is_unknown = False  # whether an attempt may have been executed
        # This clock goes on while the machine is suspended.
        self._ends = time.time() + retries.deadline.total_seconds()

    def begin(self) -> None:
        """Begin the next attempt, before anything is sent.

        Raises:
            OutcomeUnknown: the deadline passed during the wait, such as in a suspended laptop.
        """
        if self.attempts and time.time() > self._ends:
            raise OutcomeUnknown(self.key, self.attempts, "the deadline is over")
        self.attempts += 1

    def received(self, response: Any) -> float | None:
        """The seconds until the next attempt; ``None``: return the response.

        Raises:
            OutcomeUnknown: the response is not final, and there is no further attempt; or it does
                not hold for an earlier attempt.
        """
        if not is_retryable(response):
            if self._is_unknown and not _is_conclusive(response):
                reason = "the last response does not say what became of an earlier attempt"
                raise OutcomeUnknown(self.key, self.attempts, reason, response)
            self._retries.budget.put_back()
            return None
        status = response.status_code
        is_known = status in _NOT_EXECUTED or _problem(response).get("state") == "not-executed"
        self._is_unknown |= not is_known
        self._in_progress += status == _IN_PROGRESS or status in _SUCCESS
        at_least = retry_after(response.headers.get("Retry-After", ""))
        return self._wait(at_least, response=response)

    def failed(self, error: Exception, *, sent: bool = True) -> float | None:
        """The seconds until the next attempt; ``None``: raise the error.

        Args:
            error: instead of a response. It gets the key, as ``idempotency_key``.
            sent: whether the request may have reached the server.

        Raises:
            OutcomeUnknown: there is no further attempt, and one may have reached the server.
        """
        error.idempotency_key = self.key  # type: ignore[attr-defined]
        retryable = is_retryable(error)
        is_refused = not retryable and getattr(error, "response", None) is not None
        self._is_unknown |= sent and not is_refused
        if retryable:
            return self._wait(error=error)
        if self._is_unknown:
            reason = "it ended with an error that a retry does not mend"
            raise OutcomeUnknown(self.key, self.attempts, reason) from error
        return None

    def _wait(
        self,
        at_least: timedelta = timedelta(0),
        *,
        response: Any = None,
        error: Exception | None = None,
    ) -> float | None:
        """The seconds until the next attempt; ``None``: there is none, and none was executed."""
        retries = self._retries
        longest = retries.backoff.after(self.attempts).total_seconds()
        wait = at_least.total_seconds() + random.uniform(0, longest)  # noqa: S311  # no secret
        if max(self.attempts - self._in_progress, 1) >= retries.attempts:
            reason = f"the limit is attempts={retries.attempts}"
        elif time.time() + wait > self._ends:
            reason = f"the deadline is {retries.deadline.total_seconds():g} seconds"
        elif not retries.budget.take():
            reason = "the retry budget is used up"
        else:
            return wait
        if self._is_unknown:
            raise OutcomeUnknown(self.key, self.attempts, reason, response) from error
        return None


class _Keyed:
    """What both clients share: the key of a request, and the flow of its attempts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.retries = Retries.taken_from(options)
        super().__init__(*args, **options)  # of the client of httpx below

    def _keyed(self, request: httpx.Request) -> httpx.Request | None:
        """A copy of the request with a key; ``None``: it is sent as it is."""
        key = request.extensions.get(_EXTENSION, "")
        if request.method in SAFE_METHODS or key is None:
            return None
        method, url, header = request.method, request.url, self.retries.header
        if not _can_resend(request):
            raise ValueError(
                f"The body of {method} {_shown(url)} is a stream, which can be sent only once, so "
                "the request cannot be retried. Pass the content as bytes. If the server needs no "
                "key, turn the key off."
            )
        keyed = httpx.Request(
            method,
            url,
            headers=request.headers,
            stream=request.stream,
            extensions=request.extensions,
        )
        if _EXTENSION in request.extensions:
            keyed.headers[header] = self.retries.header_value(key)
        elif header not in keyed.headers:
            keyed.headers[header] = self.retries.header_value(_new_key(method, url))
        return keyed

    async def _attempts(
        self, request: httpx.Request, send: Any, read: Any, close: Any, sleep: Any
    ) -> httpx.Response:
        """The response that holds for each attempt. The functions may be async."""
        call = Call(self.retries, request.headers[self.retries.header])
        while True:
            call.begin()
            try:
                response = await _result_of(send(request))
                if response.status_code >= _ERRORS:
                    await _result_of(read(response))  # despite stream=True
            except Exception as error:
                wait = call.failed(error, sent=not isinstance(error, _NOT_SENT))
                if wait is None:
                    raise
            else:
                try:
                    wait = call.received(response)
                except OutcomeUnknown:
                    await _result_of(close(response))  # despite stream=True
                    raise
                if wait is None:
                    return response  # type: ignore[no-any-return]
                await _result_of(close(response))
            await _result_of(sleep(wait))


class IdempotentClient(_Keyed, httpx.Client):
    """An ``httpx.Client`` that sends unsafe requests with a key, and retries them with that key.

    ::

        client = IdempotentClient(base_url="https://shop.example.com")
        client.post("/charges/", json={"amount": 500}, extensions={"idempotency_key": key})

    Without ``idempotency_key``, a request gets a new key. Within an execution, it gets a key that
    is the same on each attempt at the execution. ``None`` turns key and retries off. A request with
    a key follows no redirect.

    A response is returned if it holds for each attempt. Each error of an attempt has the attribute
    ``idempotency_key``. Safe requests are sent as they are. A request of your own that you pass to
    ``send()`` is not changed: a copy of it gets the key, and is the response's ``request``.

    Args:
        args: as for ``httpx.Client``.
        options: those of :class:`~idempotency_django.client.Retries`, and those of
            ``httpx.Client``.

    Raises:
        OutcomeUnknown: raised by requests: no response holds for each attempt.
        ValueError: raised by requests: the key is invalid, or the body cannot be sent twice.
    """

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        keyed = self._keyed(request)
        if keyed is None:
            return super().send(request, **options)
        send = partial(super().send, **{**options, "follow_redirects": False})
        read, close = httpx.Response.read, httpx.Response.close
        return _finished(self._attempts(keyed, send, read, close, time.sleep))


class AsyncIdempotentClient(_Keyed, httpx.AsyncClient):
    """The same as :class:`IdempotentClient`, on ``httpx.AsyncClient``."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        keyed = self._keyed(request)
        if keyed is None:
            return await super().send(request, **options)
        send = partial(super().send, **{**options, "follow_redirects": False})
        read, close = httpx.Response.aread, httpx.Response.aclose
        return await self._attempts(keyed, send, read, close, anyio.sleep)


async def _result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _finished(flow: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The result of a coroutine that awaits nothing."""
    try:
        flow.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("A client that is not async awaited something.")


def _can_resend(request: httpx.Request) -> bool:
    """Whether the body can be sent again.

    The classes for bytes and forms work in sync and async code; those that wrap an iterator or a
    file work in one of them. A form has no known length if one of its files cannot be rewound.
    """
    stream = request.stream
    both = hasattr(stream, "__iter__") and hasattr(stream, "__aiter__")
    return both and "Transfer-Encoding" not in request.headers
