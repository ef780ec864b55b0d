"""What ``pytest --idempotency-replay`` adds to a run: each unsafe request of a test is sent twice.

The second request runs in a :func:`~.writes.rehearsal`: what it does is noted, and undone. The test
sees only the first response. Once for each endpoint, another user sends the request, too.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from http.cookies import SimpleCookie
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, models
from django.test import AsyncClient, Client, TestCase
from django.test.client import FakePayload
from django.urls import Resolver404, resolve

from .. import signals
from ..checks import Endpoint, endpoint_of
from ..conf import conf
from ..errors import ResponseNotStored
from ..http import REPLAYED_HEADER, meta_name, readable_route, serving, status_of
from ..policy import NEVER_STORED, UNSAFE_METHODS, Policy
from ..policy import resolve as resolved
from .clients import BODY, copied_body, difference
from .effects import DID, Effect, OfRequest, effects_of_request, effects_outside
from .plugin import IGNORE, MARK, OPTION
from .writes import Effects, Writes, bookkeeping_tables, rehearsal, table_written

_CREDENTIAL_HEADERS: Final = ("Authorization", "X-Api-Key", "X-Auth-Token")
_IDEMPOTENT: Final = frozenset({"PUT", "DELETE"})  # by themselves: RFC 9110, section 9.2.2
_ADVICE: Final = {
    "unprotected": "Nothing protects this endpoint, so a client that retries does it twice. "
    "Protect it with IdempotentViewMixin, @idempotent or a policy under IdempotencyMiddleware. If "
    "it is harmless, mark the view with @idempotency_exempt.",
    "protected": "The endpoint is protected, but this happens outside of what is protected: in a "
    "middleware, an authentication, a permission or dispatch(), for example. Move it into the "
    "handler.",
    "unkeyed": "The endpoint is protected, but not for this request: it has no key, or the "
    "policy leaves it out. Send a key, or require one.",
    "refused": "A client that retries does not get the first response. Compare the two requests: "
    "what changes between them must not identify the operation.",
    "foreign": "A key must belong to its caller: look it up together with the user.",
}


class _Environ:
    """A request of Django's Client, which can be sent again.

    Attributes:
        request: what the client sends.
        method, path: of it.
        body: its bytes; ``None``: they can be read only once.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.method = request["REQUEST_METHOD"]
        self.path = request["PATH_INFO"].encode("latin-1", "replace").decode(errors="replace")
        self.body = copied_body(request)

    def has_key(self, header: str, client: Any) -> bool:
        """Whether there is a key in the header, of the request or of all of its client's."""
        name = meta_name(header)
        return name in self.request or name in client.defaults

    def add_key(self, header: str) -> None:
        """Add a new key."""
        self.request[meta_name(header)] = str(uuid4())

    def again(self, *, anonymous: bool = False) -> dict[str, Any]:
        """The request once more, with all of its body.

        Args:
            anonymous: leave out who sends it.
        """
        left_out = set(map(meta_name, _CREDENTIAL_HEADERS)) if anonymous else set()
        kept = {name: value for name, value in self.request.items() if name not in left_out}
        return {**kept, BODY: FakePayload(self.body)}


class _Scope(_Environ):
    """A request of the AsyncClient."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.method = request["method"]
        self.path = request["path"]
        self.body = copied_body(request, "_body_file")

    def has_key(self, header: str, client: Any) -> bool:
        return any(name == _wire(header) for name, _ in self.request["headers"])

    def add_key(self, header: str) -> None:
        kept = [pair for pair in self.request["headers"] if pair[0] != _wire(header)]
        self.request["headers"] = [*kept, (_wire(header), str(uuid4()).encode())]

    def again(self, *, anonymous: bool = False) -> dict[str, Any]:
        left_out = set(map(_wire, _CREDENTIAL_HEADERS)) if anonymous else set()
        headers = [pair for pair in self.request["headers"] if pair[0] not in left_out]
        return {**self.request, "headers": headers, "_body_file": FakePayload(self.body)}


def _wire(header: str) -> bytes:
    return header.lower().encode("ascii")


class _Repeat:
    """A request once more, in a block that undoes it.

    Args:
        client: sends it.
        request: what it sends.
        ignore: tables that may be written to.

    Attributes:
        effects: what it did, after the block.
        outside: what it did that no rollback undoes.
        response, error: how it ended.
    """

    def __init__(self, client: Any, request: dict[str, Any], ignore: frozenset[str]) -> None:
        self.client: Any = client
        self.request = request
        self.effects = Effects()
        self.outside: OfRequest = {}
        self.response: Any = None
        self.error: Exception | None = None
        self._ignore = ignore
        self._undo = ExitStack()

    def __enter__(self) -> _Repeat:
        self.effects = self._undo.enter_context(rehearsal(self._ignore))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class _Stopped(Exception):
    """A view began to write."""


def _stop(execute: Any, sql: Any, *arguments: Any) -> Any:
    table = table_written(str(sql))
    if table is not None and table not in bookkeeping_tables():
        raise _Stopped
    return execute(sql, *arguments)


class _Foreign(_Repeat):
    """The same, sent by another user, who is made for it. The view is stopped when it writes."""

    def __init__(self, first: Any, *args: Any) -> None:
        super().__init__(*args)
        self._first = first

    def __enter__(self) -> _Repeat:
        self._undo.enter_context(rehearsal())
        self.client = _other_client(self.client, self._first)
        for connection in connections.all():
            self._undo.enter_context(connection.execute_wrapper(_stop))
        return super().__enter__()


def _other_client(client: Any, response: Any) -> Any:
    """A client of another user with the same rights; ``None``: such a user cannot be made."""
    try:
        user = _double(_caller(response))
        other = copy.copy(client)
        other.cookies = SimpleCookie()
        left_out = set(map(meta_name, _CREDENTIAL_HEADERS))
        other.defaults = {k: v for k, v in client.defaults.items() if k not in left_out}
        other.handler = copy.copy(client.handler)
        if hasattr(other.handler, "_force_user"):
            other.handler._force_user = user
        other.force_login(user)
    except Exception:  # noqa: BLE001  # a user model may refuse it in any way
        return None
    for name in ("get_response", "get_response_async"):
        setattr(other.handler, name, partial(_as_user, user, getattr(other.handler, name)))
    return other


def _as_user(user: Any, get_response: Callable[[Any], Any], request: Any) -> Any:
    """Call a handler so that REST framework, if the view is its, knows who is calling."""
    request._force_auth_user, request._force_auth_token = user, None
    return get_response(request)


def _caller(response: Any) -> Any:
    """The user who got a response."""
    own = (getattr(response, "renderer_context", None) or {}).get("request")
    http = getattr(response, "wsgi_request", None) or getattr(response, "asgi_request", None)
    for request in (own, http):
        user = getattr(request, "user", None)
        if getattr(user, "is_authenticated", False):
            return user
    raise LookupError


def _double(user: Any) -> Any:
    """Save a second user with the same rights."""
    model = user.__class__
    double = model._base_manager.get(pk=user.pk)
    vars(double).update(_unique_values(model._meta.concrete_fields))
    double._state.adding = True
    double.save_base(raw=True, force_insert=True)
    for each in model._meta.many_to_many:
        if each.remote_field.through._meta.auto_created:
            getattr(double, each.name).set(getattr(user, each.name).all())
    return double


def _unique_values(fields: Iterable[Any]) -> dict[str, Any]:
    """New values for the unique ones of these fields.

    Raises:
        TypeError: there is no new value for one of them, because of its kind.
    """
    made = uuid4()
    values: dict[str, Any] = {}
    for each in fields:
        match each:
            case models.AutoField():
                values[each.attname] = None
            case models.UUIDField(unique=True):
                values[each.attname] = made
            case models.EmailField(unique=True):
                values[each.attname] = f"{made.hex}@example.com"
            case models.CharField(unique=True):
                values[each.attname] = made.hex[: each.max_length]
            case models.Field(unique=True):
                raise TypeError(each.name)
    return values


class _Sending:
    """A request of a test that is sent twice.

    Args:
        test: what it is part of.
        client: sends it.
        message: the request.
        endpoint: where it leads to.
    """

    def __init__(self, test: _Test, client: Any, message: _Environ, endpoint: Endpoint) -> None:
        self._test = test
        self._client = client
        self._cookies = copy.copy(client.cookies)  # a retry knows none of the response's
        self._message = message
        self._endpoint = endpoint
        self._policy = resolved(endpoint.policy) if endpoint.policy else None
        self._claimed = False
        self._first_writes = Writes(test.ignore)

    @contextmanager
    def first(self) -> Iterator[None]:
        """The request is sent in the block."""

        def note(**_: Any) -> None:
            self._claimed = True

        signals.claimed.connect(note)
        try:
            with self._first_writes, effects_outside() as effects:
                yield
        finally:
            signals.claimed.disconnect(note)
        outside = [effect for effect in effects if effect.peer not in self._test.ignore]
        if outside:
            advice = _allowed(effect.peer for effect in outside)
            what = "did something that no rollback undoes:"
            self._test.find(self._name, what, map(str, outside), advice)

    def repeats(self, first: Any) -> Iterator[_Repeat]:
        """The requests to send in response to the first one's response."""
        if first.status_code >= 500 or first.status_code in NEVER_STORED:
            return  # a retry is executed, and may be
        if any(each.in_atomic_block and each.needs_rollback for each in connections.all()):
            return
        is_protected = self._claimed or self._is_replay(first)
        if not is_protected and first.status_code >= 400:
            return
        client = copy.copy(self._client)
        client.cookies = copy.copy(self._cookies)
        retry = _Repeat(client, self._message.again(), self._test.ignore)
        yield retry
        self._test.count("sent")
        if self._has_effect(retry, is_protected=is_protected):
            return
        if is_protected and self._client.cookies == self._cookies:  # it is the same caller
            wrong = self._wrong(first, retry)
            if wrong:
                self._test.find(
                    self._name,
                    "was sent again, and did not get a replay:",
                    [wrong],
                    _ADVICE["refused"],
                )
        elif not is_protected and self._has_other_protection(first):
            yield from self._foreign(first)

    def _has_effect(self, retry: _Repeat, *, is_protected: bool) -> bool:
        """Whether the retry did something, which is a finding."""
        writes = retry.effects.writes
        outside = [] if is_protected else [*retry.outside.values()]  # else what authenticates
        if not is_protected and self._message.method in _IDEMPOTENT:
            writes = [write for write in writes if "INSERT" in write.sql]  # the others may be again
            outside = [effect for effect in outside if effect.kind != "file"]
        outside = [effect for effect in outside if effect.peer not in self._test.ignore]
        lines = [*map(str, writes), *retry.effects.others, *map(_again, outside)]
        if lines:
            advice = _ADVICE["protected"] if is_protected else self._advice
            if names := [*(write.table for write in writes), *(each.peer for each in outside)]:
                advice = f"{advice} {_allowed(names)}"
            self._test.find(self._name, "was sent again, and had an effect:", lines, advice)
        return bool(lines)

    @property
    def _advice(self) -> str:
        """What to do about an endpoint that did not protect the request."""
        endpoint = self._endpoint
        if endpoint.problem:
            return f"Nothing protects this endpoint. {endpoint.problem}"
        if endpoint.policy:
            return _ADVICE["unkeyed"]
        return _ADVICE["unprotected"]

    def _wrong(self, first: Any, retry: _Repeat) -> str:
        if retry.error is not None:
            return f"it raised {type(retry.error).__name__}: {retry.error}"
        status = retry.response.status_code
        if status == 429 or self._is_tombstone(retry.response):
            return ""
        is_replay = self._is_replay(retry.response)
        if is_replay and self._policy is not None and self._policy.on_replay is not None:
            return ""  # it alters replays
        different = difference(first, retry.response)
        is_other_body = different and status == first.status_code and not is_replay
        return "" if is_other_body else "".join(different)

    def _is_tombstone(self, response: Any) -> bool:
        """Whether a response says that the first one was not stored, such as a stream or a page."""
        content = getattr(response, "content", b"").replace(b"_", b"-")
        is_status = response.status_code == status_of(ResponseNotStored)
        return is_status and ResponseNotStored.slug.encode() in content

    def _is_replay(self, response: Any) -> bool:
        """Whether a response is marked as a replay."""
        return bool(response.get(REPLAYED_HEADER) == "true")

    def _has_other_protection(self, first: Any) -> bool:
        """Whether the project seems to look up the key itself, asked once for each endpoint."""
        return (
            bool(self._first_writes.all and getattr(first, "content", b""))
            and self._message.has_key(conf.header, self._client)
            and self._test.replays.is_new(self._endpoint)
        )

    def _foreign(self, first: Any) -> Iterator[_Repeat]:
        """Send it as another user, who must not get the same response."""
        other = self._by_other(first)
        yield other
        if other.client is not None:
            self._test.replays.note(self._endpoint)
        if not _is_same(first, other):
            return
        self._message.add_key(conf.header)
        control = self._by_other(first)
        yield control
        if not _is_same(first, control):  # else everybody gets it, under whatever key
            line = f"its response is {first.content[:200].decode(errors='replace')!r}"
            self._test.find(
                self._name, "gave another user the same response:", [line], _ADVICE["foreign"]
            )

    def _by_other(self, first: Any) -> _Repeat:
        request = self._message.again(anonymous=True)
        return _Foreign(first, self._client, request, self._test.ignore)

    @property
    def _name(self) -> str:
        return f"{self._message.method} {self._message.path}"


def _allowed(names: Iterable[str]) -> str:
    listed = ", ".join(sorted({repr(name) for name in names}))
    return f"To allow it in this test: @pytest.mark.{MARK}(ignore={{{listed}}})."


def _again(effect: Effect) -> str:
    where = f" at {effect.where}" if effect.where else ""
    return f"{DID[effect.kind]} {effect.peer} again{where}"


def _is_same(first: Any, other: _Repeat) -> bool:
    """Whether a request that wrote nothing got the response of the first one."""
    return other.response is not None and not difference(first, other.response)


class _Test:
    """A test that runs, and what was found in it."""

    def __init__(self, replays: Replays, item: pytest.Item) -> None:
        self.replays = replays
        self.name = item.nodeid
        # Unsafe requests: of the clients; of these, sent twice; skipped; of others, as a live
        # server's, which reached a protected view.
        self.counts = Counter(unsafe=0, sent=0, skipped=0, elsewhere=0)
        self.findings: dict[str, None] = {}
        self._shown = 0
        self._lock = threading.Lock()
        ignore = set(item.config.getini(IGNORE))
        self.is_off = False
        for mark in item.iter_markers(MARK):
            ignore.update(mark.kwargs.get("ignore", ()))
            self.is_off = self.is_off or bool(mark.kwargs.get("off"))
        self.ignore = frozenset(ignore)

    def find(self, request: str, what: str, lines: Iterable[str], advice: str) -> None:
        """Keep a finding."""
        shown = "\n".join(f"    {line}" for line in lines)
        found = f"{request} of {self.name} {what}\n{shown}\n{advice}"
        self.findings[found.rstrip()] = None

    def count(self, what: str) -> None:
        """Count a request; in any thread, as there are races and live servers."""
        with self._lock:
            self.counts[what] += 1

    @property
    def report(self) -> str:
        """The findings that no report has shown so far."""
        return "\n\n".join(list(self.findings)[self._shown :])

    def fail(self) -> None:
        """Fail the test if there are any."""
        if self.report:
            pytest.fail(self.report, pytrace=False)

    def show(self, report: pytest.TestReport) -> None:
        """Show them in a report of the test."""
        if self.report and self.report not in report.longreprtext:
            report.sections.append(("Captured idempotency replay", self.report))
        self._shown = len(self.findings)


_by_client: ContextVar[bool] = ContextVar("idempotency_replay_by_client", default=False)


@contextmanager
def _sent_by_client() -> Iterator[None]:
    token = _by_client.set(True)
    try:
        yield
    finally:
        _by_client.reset(token)


class Replays:
    """Sends the unsafe requests of each test twice, and fails the test where it finds something."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._test: _Test | None = None
        self._seen: set[tuple[str, str]] = set()
        self._captures = 0  # how many blocks capture on_commit hooks
        self._undo = ExitStack()
        self._counts: Counter[str] = Counter()

    def is_new(self, endpoint: Endpoint) -> bool:
        """Whether no other user has sent a request to an endpoint."""
        return (endpoint.method, endpoint.route) not in self._seen

    def note(self, endpoint: Endpoint) -> None:
        """Note that another user has."""
        self._seen.add((endpoint.method, endpoint.route))

    # The clients.

    def pytest_sessionstart(self) -> None:
        """Put ourselves between the tests' clients and the project."""
        self._undo.enter_context(patch.object(Client, "request", self._sync(Client.request)))
        self._undo.enter_context(
            patch.object(AsyncClient, "request", self._async(AsyncClient.request))
        )
        capture = staticmethod(self._capturing(TestCase.captureOnCommitCallbacks))
        self._undo.enter_context(patch.object(TestCase, "captureOnCommitCallbacks", capture))
        # Each request to a protected view asks this first, also one that no client has sent.
        self._undo.enter_context(
            patch.object(serving, "init_idempotency", self._reached(serving.init_idempotency))
        )

    def pytest_sessionfinish(self) -> None:
        """Leave the clients."""
        self._undo.close()

    def _sync(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @_sent_by_client()
        def request(client: Any, **request: Any) -> Any:
            message = _Environ(request)
            is_race = threading.current_thread() is not threading.main_thread()
            sending = self._sending(client, message, is_race=is_race)
            if sending is None:
                return send(client, **request)
            with sending.first():
                response = send(client, **request)
            for repeat in sending.repeats(response):
                with repeat:
                    if repeat.client is not None:
                        try:
                            with effects_of_request() as repeat.outside:
                                repeat.response = send(repeat.client, **repeat.request)
                        except Exception as error:  # noqa: BLE001  # the view's, or its middleware's
                            repeat.error = error
            return response

        return request

    def _async(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def twice(client: Any, request: dict[str, Any]) -> Any:
            # Whatever asks the database does so in the thread that the views do it in.
            sending = await sync_to_async(self._sending)(client, _Scope(request))
            if sending is None:
                return await send(client, **request)
            first = sending.first()
            await sync_to_async(first.__enter__)()
            try:
                response = await send(client, **request)
            finally:
                await sync_to_async(first.__exit__)(None, None, None)
            repeats = sending.repeats(response)
            while (repeat := await sync_to_async(_next)(repeats)) is not None:
                await sync_to_async(repeat.__enter__)()
                try:
                    if repeat.client is not None:
                        with effects_of_request() as repeat.outside:
                            repeat.response = await send(repeat.client, **repeat.request)
                except Exception as error:  # noqa: BLE001
                    repeat.error = error
                finally:
                    await sync_to_async(repeat.__exit__)(None, None, None)
            return response

        async def request(client: Any, **request: Any) -> Any:
            with _sent_by_client():
                return await twice(client, request)

        return request

    def _capturing(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Know of the blocks in which a test counts hooks."""

        @contextmanager
        def capture_on_commit_callbacks(**options: Any) -> Iterator[Any]:
            self._captures += 1
            try:
                with capture(**options) as callbacks:
                    yield callbacks
            finally:
                self._captures -= 1

        return capture_on_commit_callbacks

    def _reached(self, init: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Count the requests to protected views that no client has sent."""

        def init_idempotency(request: Any) -> bool:
            takes_part = init(request)
            is_unsafe = takes_part and request.method in UNSAFE_METHODS
            test = self._test
            if is_unsafe and test and not (test.is_off or _by_client.get()):
                test.count("elsewhere")
            return takes_part

        return init_idempotency

    def _sending(self, client: Any, message: _Environ, *, is_race: bool = False) -> _Sending | None:
        """The request, if it is sent twice; ``None``: it is sent once, as it is."""
        test = self._test
        if test is None or test.is_off or message.method not in UNSAFE_METHODS:
            return None
        test.count("unsafe")
        endpoint = None if is_race else _endpoint(message)
        if endpoint is None or endpoint.how in ("exempt", "inbox"):
            return None
        is_protected = bool(endpoint.how) and not endpoint.problem
        policy = resolved(endpoint.policy or Policy())
        has_key = message.has_key(conf.header, client)
        if self._mode == "protected" and not (is_protected or has_key):
            return None
        if message.body is None:
            test.count("skipped")
            return None
        takes_uuid = policy.key_format in ("any", "uuid")
        is_optional = policy.key is None and not policy.requires_key(message.method)
        if is_protected and is_optional and takes_uuid and not has_key:
            if self._captures or any(each.force_debug_cursor for each in connections.all()):
                test.count("skipped")  # a key adds hooks and statements to those that are counted
                return None
            message.add_key(conf.header)
        return _Sending(test, client, message, endpoint)

    # The tests.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A test begins, and ends."""
        self._test = _Test(self, item)
        try:
            return (yield)
        finally:
            self._test = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Fail a test that passes, but whose retries did something."""
        result = yield
        if self._test:
            self._test.fail()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """The same for what its fixtures send when they end, and for a test that was skipped."""
        result = yield
        if self._test:
            self._test.fail()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Show what was found in a test that fails for another reason: it may be the reason.

        Count, also for the process that starts the others of pytest-xdist.
        """
        report = yield
        test = self._test
        if test and (report.failed or hasattr(report, "wasxfail")):
            test.show(report)
        if test and report.when == "teardown":
            setattr(report, MARK, {**test.counts, "found": len(test.findings)})
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up what was counted."""
        self._counts.update(getattr(report, MARK, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was done, because a run without findings looks like one without requests."""
        counts = self._counts
        found = "1 finding" if counts["found"] == 1 else f"{counts['found']} findings"
        line = (
            f"{counts['sent']} of {_were(counts['unsafe'], 'unsafe request')} sent twice; {found}"
        )
        if counts["skipped"]:
            line += (
                f"; {_were(counts['skipped'])} sent once (queries or hooks counted, or a stream as "
                "body)"
            )
        terminalreporter.write_sep("-", "idempotency replay")
        terminalreporter.write_line(line)
        if counts["elsewhere"]:
            others = _were(counts["elsewhere"], "other request")
            terminalreporter.write_line(
                f"{others} sent once to protected views, but not by Django's test clients: from a "
                "RequestFactory or to a live server, for example"
            )
        if not counts["sent"]:
            terminalreporter.write_line(
                "Nothing was sent twice, so this run says nothing about retries.", yellow=True
            )


def _were(count: int, what: str = "") -> str:
    plural = "s" if what and count != 1 else ""
    return f"{count} {what}{plural}".rstrip() + (" was" if count == 1 else " were")


def _next(repeats: Iterator[_Repeat]) -> _Repeat | None:
    return next(repeats, None)


def _endpoint(message: _Environ) -> Endpoint | None:
    try:
        match = resolve(message.path)
    except Resolver404:
        return None
    return endpoint_of(match.func, message.method, readable_route(match.route))


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    config.pluginmanager.register(Replays(config.getoption(OPTION)), "idempotency-replays")
