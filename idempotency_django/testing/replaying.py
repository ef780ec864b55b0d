"""What ``pytest --idempotency-replay`` adds to a run: each unsafe request of a test is sent twice.

The second request runs in a :func:`~.writes.rehearsal`: what it does is noted, and undone. The test
sees only the first response.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient, Client, TestCase
from django.test.client import FakePayload
from django.urls import Resolver404, resolve

from .. import signals
from ..checks import Endpoint, endpoint_of
from ..conf import conf
from ..errors import ResponseNotStored
from ..http import REPLAYED_HEADER, meta_name, readable_route, status_of
from ..policy import NEVER_STORED, UNSAFE_METHODS, Policy
from ..policy import resolve as resolved
from .clients import BODY, copied_body, difference
from .effects import effects_outside
from .plugin import IGNORE, MARK, OPTION
from .writes import Effects, rehearsal

_OVERWRITING: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""Methods that may write the same values again, as long as they add nothing."""
_ADDS: Final = re.compile(r"INSERT|MERGE|REPLACE|.* SET .*= \(", re.IGNORECASE | re.DOTALL)
"""A statement that adds a row, or computes a value, such as ``SET amount = (amount + 1)``."""
_OTHER_CALLER: Final = (401, 403)
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

    def again(self) -> dict[str, Any]:
        """The request once more, with all of its body."""
        return {**self.request, BODY: FakePayload(self.body)}


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
        self.request["headers"] = [*self.request["headers"], (_wire(header), str(uuid4()).encode())]

    def again(self) -> dict[str, Any]:
        return {**self.request, "_body_file": FakePayload(self.body)}


def _wire(header: str) -> bytes:
    return header.lower().encode("ascii")


class _Retry:
    """A request once more.

    Attributes:
        client: sends it.
        request: what it sends.
        response, error: how it ended.
    """

    def __init__(self, client: Any, request: dict[str, Any]) -> None:
        self.client = client
        self.request = request
        self.response: Any = None
        self.error: Exception | None = None


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
        self._policy = resolved(endpoint.policy or Policy())
        self._claimed = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """The request is sent in the block."""

        def note(**_: Any) -> None:
            self._claimed = True

        signals.claimed.connect(note)
        try:
            with effects_outside() as effects:
                yield
        finally:
            signals.claimed.disconnect(note)
        outside = [effect for effect in effects if effect.peer not in self._test.ignore]
        if outside:
            advice = _allowed(effect.peer for effect in outside)
            self._find("did something that no rollback undoes:", map(str, outside), advice)

    @contextmanager
    def retry(self, first: Any) -> Iterator[_Retry | None]:
        """The request to send again in the block, which undoes it; ``None``: it is not sent again.

        Args:
            first: the first response.
        """
        is_protected = self._claimed or _is_replay(first)
        if not self._is_worth_a_retry(first, is_protected=is_protected):
            yield None
            return
        client = copy.copy(self._client)
        client.cookies = copy.copy(self._cookies)
        retry = _Retry(client, self._message.again())
        with rehearsal(self._test.ignore) as effects:
            yield retry
        self._test.count("sent")
        if self._has_effect(effects, is_protected=is_protected) or not is_protected:
            return
        if wrong := self._wrong(first, retry):
            self._find("was sent again, and did not get a replay:", [wrong], _ADVICE["refused"])

    def _is_worth_a_retry(self, first: Any, *, is_protected: bool) -> bool:
        """Whether a retry must not have an effect: after an error, for one, it may."""
        status = first.status_code
        if status >= 500 or status in NEVER_STORED or (status >= 400 and not is_protected):
            return False
        if "stored=?0" in first.get(conf.status_header or "", "") and status >= 400:
            return False  # the handler has raised it, so a retry is executed
        return not any(each.in_atomic_block and each.needs_rollback for each in connections.all())

    def _has_effect(self, effects: Effects, *, is_protected: bool) -> bool:
        """Whether the retry did something, which is a finding."""
        writes = effects.writes
        if not is_protected and self._message.method in _OVERWRITING:
            writes = [write for write in writes if _ADDS.match(write.sql)]
        lines = [*map(str, writes), *effects.others]
        if lines:
            advice = _ADVICE["protected"] if is_protected else self._advice
            if writes:
                advice = f"{advice} {_allowed(write.table for write in writes)}"
            self._find("was sent again, and had an effect:", lines, advice)
        return bool(lines)

    @property
    def _advice(self) -> str:
        """What to do about an endpoint that did not protect the request."""
        if self._endpoint.problem:
            return f"Nothing protects this endpoint. {self._endpoint.problem}"
        return _ADVICE["unkeyed" if self._endpoint.policy else "unprotected"]

    def _wrong(self, first: Any, retry: _Retry) -> str:
        """Why the response to the retry is no replay; empty: it is one, or need not be."""
        if retry.error is not None:
            return f"it raised {type(retry.error).__name__}: {retry.error}"
        response, is_replay = retry.response, _is_replay(retry.response)
        # After a logout, or with a new password, a retry is another caller's.
        is_other_caller = response.status_code in _OTHER_CALLER and not is_replay
        is_other_caller = is_other_caller or self._client.cookies != self._cookies
        is_altered = is_replay and self._policy.on_replay is not None
        if is_other_caller or is_altered or response.status_code == 429 or _is_tombstone(response):
            return ""
        different = difference(first, response)
        is_other_body = response.status_code == first.status_code and not is_replay
        return "" if is_other_body else "".join(different)

    def _find(self, what: str, lines: Iterable[str], advice: str) -> None:
        request = f"{self._message.method} {self._message.path}"
        self._test.find(request, what, lines, advice)


def _is_replay(response: Any) -> bool:
    """Whether a response is marked as a replay."""
    return bool(response.get(REPLAYED_HEADER) == "true")


def _is_tombstone(response: Any) -> bool:
    """Whether a response says that the first one was not stored, such as a stream or a page."""
    content = getattr(response, "content", b"").replace(b"_", b"-")
    is_status = response.status_code == status_of(ResponseNotStored)
    return is_status and ResponseNotStored.slug.encode() in content


def _allowed(names: Iterable[str]) -> str:
    listed = ", ".join(sorted({repr(name) for name in names}))
    return f"To allow it in this test: @pytest.mark.{MARK}(ignore={{{listed}}})."


class _Test:
    """A test that runs, and what was found in it."""

    def __init__(self, item: pytest.Item) -> None:
        self.name = item.nodeid
        self.counts = Counter(unsafe=0, sent=0, skipped=0)
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


class Replays:
    """Sends the unsafe requests of each test twice, and fails the test where it finds something."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._test: _Test | None = None
        self._captures = 0  # how many blocks capture on_commit hooks
        self._undo = ExitStack()
        self._counts: Counter[str] = Counter()

    # The clients.

    def pytest_sessionstart(self) -> None:
        """Put ourselves between the tests' clients and the project."""
        self._undo.enter_context(patch.object(Client, "request", self._sync(Client.request)))
        self._undo.enter_context(
            patch.object(AsyncClient, "request", self._async(AsyncClient.request))
        )
        capture = staticmethod(self._capturing(TestCase.captureOnCommitCallbacks))
        self._undo.enter_context(patch.object(TestCase, "captureOnCommitCallbacks", capture))

    def pytest_sessionfinish(self) -> None:
        """Leave the clients."""
        self._undo.close()

    def _sync(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def request(client: Any, **request: Any) -> Any:
            is_race = threading.current_thread() is not threading.main_thread()
            sending = self._sending(client, _Environ(request), is_race=is_race)
            if sending is None:
                return send(client, **request)
            with sending.first():
                response = send(client, **request)
            with sending.retry(response) as retry:
                if retry is not None:
                    try:
                        retry.response = send(retry.client, **retry.request)
                    except Exception as error:  # noqa: BLE001  # the view's, or its middleware's
                        retry.error = error
            return response

        return request

    def _async(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def request(client: Any, **request: Any) -> Any:
            sending = await sync_to_async(self._sending)(client, _Scope(request))
            if sending is None:
                return await send(client, **request)
            async with _in_thread(sending.first()):
                response = await send(client, **request)
            async with _in_thread(sending.retry(response)) as retry:
                if retry is not None:
                    try:
                        retry.response = await send(retry.client, **retry.request)
                    except Exception as error:  # noqa: BLE001
                        retry.error = error
            return response

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
        self._test = _Test(item)
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
        if not counts["sent"]:
            terminalreporter.write_line(
                "Nothing was sent twice, so this run says nothing about retries.", yellow=True
            )


def _were(count: int, what: str = "") -> str:
    plural = "s" if what and count != 1 else ""
    return f"{count} {what}{plural}".rstrip() + (" was" if count == 1 else " were")


@asynccontextmanager
async def _in_thread(block: AbstractContextManager[Any]) -> AsyncIterator[Any]:
    """A block whose begin and end are in the thread that views ask the database in."""
    entered = await sync_to_async(block.__enter__)()
    try:
        yield entered
    finally:
        await sync_to_async(block.__exit__)(None, None, None)


def _endpoint(message: _Environ) -> Endpoint | None:
    try:
        match = resolve(message.path)
    except Resolver404:
        return None
    return endpoint_of(match.func, message.method, readable_route(match.route))


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    config.pluginmanager.register(Replays(config.getoption(OPTION)), "idempotency-replays")
