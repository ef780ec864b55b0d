"""What ``pytest --idempotency-replay`` adds to a run: each unsafe request of a test is sent twice.

The second request runs in a :func:`~.writes.rehearsal`: what it does is noted, and undone. The test
sees only the first response.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import pytest
from django.db import connections
from django.test import Client, TestCase
from django.test.client import FakePayload
from django.urls import Resolver404, resolve

from .. import signals
from ..checks import Endpoint, endpoint_of, readable_route
from ..conf import conf
from ..http import REPLAYED_HEADER, STATUS_HEADER, meta_name
from ..policy import NEVER_STORED, UNSAFE_METHODS, Policy
from ..stores import Operation
from .clients import BODY, copied_body
from .plugin import IGNORE, OFF, OPTION
from .writes import rehearsal

_OVERWRITING: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""Methods that may write the same values again, as long as they add nothing."""
_ADDS: Final = re.compile(r"INSERT|MERGE|REPLACE|.* SET .*= \(", re.IGNORECASE | re.DOTALL)
"""A statement that adds a row, or computes a value, such as ``SET amount = (amount + 1)``."""
_ADVICE: Final = {
    "unprotected": "Nothing protects this endpoint, so a client that retries does it twice. "
    "Protect it with IdempotentViewMixin, @idempotent or a policy under IdempotencyMiddleware. If "
    "it is harmless, mark the view with @idempotency_exempt.",
    "protected": "The endpoint is protected, but this happens outside of what is protected: in a "
    "middleware, an authentication, a permission or dispatch(), for example. Move it into the "
    "handler.",
    "unkeyed": "The endpoint is protected, but not for this request: it has no key, or the "
    "policy leaves it out. Send a key, or require one.",
}


class _Test:
    """A test that runs, and what was found in it."""

    def __init__(self, item: pytest.Item) -> None:
        self.name = item.nodeid
        self.is_off = item.get_closest_marker(OFF) is not None
        self.ignore = frozenset(item.config.getini(IGNORE))
        self.counts = Counter(unsafe=0, sent=0)
        self.findings: dict[str, None] = {}
        self._shown = 0

    def find(self, request: str, effects: Iterable[object], advice: str) -> None:
        """Keep a finding."""
        shown = "\n".join(f"    {effect}" for effect in effects)
        found = f"{request} of {self.name} was sent again, and had an effect:\n{shown}\n{advice}"
        self.findings[found] = None

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

    def __init__(self) -> None:
        self._test: _Test | None = None
        self._captures = 0  # how many blocks capture on_commit hooks
        self._undo = ExitStack()
        self._counts: Counter[str] = Counter()

    # The client.

    def pytest_sessionstart(self) -> None:
        """Put ourselves between the tests' clients and the project."""
        self._undo.enter_context(patch.object(Client, "request", self._twice(Client.request)))
        capture = staticmethod(self._capturing(TestCase.captureOnCommitCallbacks))
        self._undo.enter_context(patch.object(TestCase, "captureOnCommitCallbacks", capture))

    def pytest_sessionfinish(self) -> None:
        """Leave the clients."""
        self._undo.close()

    def _twice(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def request(client: Any, **environ: Any) -> Any:
            test = self._test
            is_race = threading.current_thread() is not threading.main_thread()
            is_unsafe = environ.get("REQUEST_METHOD") in UNSAFE_METHODS
            if test is None or test.is_off or is_race or not is_unsafe:
                return send(client, **environ)
            test.counts["unsafe"] += 1
            endpoint, body = _endpoint(environ), copied_body(environ)
            if endpoint is None or endpoint.how in ("exempt", "inbox") or body is None:
                return send(client, **environ)
            if _takes_key(client, environ, endpoint):
                if self._is_counted():
                    return send(client, **environ)
                environ[meta_name(conf.header)] = str(uuid4())
            cookies = copy.copy(client.cookies)  # a retry knows none of the response's
            with _noting_claims() as claims:
                response = send(client, **environ)
            is_protected = bool(claims) or response.get(REPLAYED_HEADER) == "true"
            if not _is_worth_a_retry(response, is_protected=is_protected):
                return response
            test.counts["sent"] += 1
            retrying = copy.copy(client)
            retrying.cookies = cookies
            with (
                rehearsal(test.ignore) as effects,
                _noting_claims() as claims_again,
                suppress(Exception),  # the retry's own
            ):
                send(retrying, **{**environ, BODY: FakePayload(body)})
            if claims_again and _scopes(claims_again).isdisjoint(_scopes(claims)):
                return response  # it has ended its session, so the retry is another caller's
            found: list[Any] = [*effects.writes, *effects.others]
            if not is_protected and environ["REQUEST_METHOD"] in _OVERWRITING:
                found = [each for each in effects.writes if _ADDS.match(each.sql)]
                found += effects.others
            if found:
                line = f"{environ['REQUEST_METHOD']} {_path(environ)}"
                test.find(line, found, _advice(endpoint, is_protected=is_protected))
            return response

        return request

    def _is_counted(self) -> bool:
        """Whether the test counts hooks or statements, to which a key would add some."""
        return bool(self._captures) or any(each.force_debug_cursor for each in connections.all())

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

    pytest_runtest_teardown = pytest_runtest_call
    """The same for what its fixtures send when they end, and for a test that was skipped."""

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
            setattr(report, OPTION, {**test.counts, "found": len(test.findings)})
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up what was counted."""
        self._counts.update(getattr(report, OPTION, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was done, because a run without findings looks like one without requests."""
        unsafe, sent, found = (self._counts[name] for name in ("unsafe", "sent", "found"))
        terminalreporter.write_sep("-", "idempotency replay")
        terminalreporter.write_line(
            f"unsafe requests: {unsafe}; sent twice: {sent}; findings: {found}"
        )
        if not sent:
            terminalreporter.write_line(
                "Nothing was sent twice, so this run says nothing about retries.", yellow=True
            )


@contextmanager
def _noting_claims() -> Iterator[list[Operation]]:
    """The operations that the block claims: what it does is protected."""
    claims: list[Operation] = []

    def note(operation: Operation, **_: Any) -> None:
        claims.append(operation)

    signals.claimed.connect(note)
    try:
        yield claims
    finally:
        signals.claimed.disconnect(note)


def _scopes(claims: Iterable[Operation]) -> set[str]:
    return {operation.scope for operation in claims}


def _is_worth_a_retry(first: Any, *, is_protected: bool) -> bool:
    """Whether a retry must not have an effect: after an error, for one, it may."""
    status = first.status_code
    if status >= 500 or status in NEVER_STORED or (status >= 400 and not is_protected):
        return False
    if "stored=?0" in first.get(STATUS_HEADER, "") and status >= 400:
        return False  # the handler has raised it, so a retry is executed
    return not any(each.in_atomic_block and each.needs_rollback for each in connections.all())


def _is_protected(endpoint: Endpoint) -> bool:
    return bool(endpoint.how) and not endpoint.problem


def _takes_key(client: Any, environ: dict[str, Any], endpoint: Endpoint) -> bool:
    """Whether the request has no key, and its endpoint takes one, but does not need it."""
    header, policy = meta_name(conf.header), (endpoint.policy or Policy()).resolved()
    if header in environ or header in client.defaults or not _is_protected(endpoint):
        return False
    is_optional = policy.key is None and not policy.requires_key(environ["REQUEST_METHOD"])
    return is_optional and policy.key_format in ("any", "uuid")


def _advice(endpoint: Endpoint, *, is_protected: bool) -> str:
    """What to do about an effect."""
    if is_protected:
        return _ADVICE["protected"]
    if endpoint.problem:
        return f"Nothing protects this endpoint. {endpoint.problem}"
    return _ADVICE["unkeyed" if endpoint.policy else "unprotected"]


def _path(environ: dict[str, Any]) -> str:
    text: str = environ["PATH_INFO"]
    return text.encode("latin-1", "replace").decode(errors="replace")


def _endpoint(environ: dict[str, Any]) -> Endpoint | None:
    try:
        match = resolve(_path(environ))
    except Resolver404:
        return None
    return endpoint_of(match.func, environ["REQUEST_METHOD"], readable_route(match.route))


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    config.pluginmanager.register(Replays(), OPTION)
