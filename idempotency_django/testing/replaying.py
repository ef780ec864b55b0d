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
from django.test import Client
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
_OVERWRITES: Final = re.compile(r"DELETE|UPDATE(?!.* SET .*= \()", re.IGNORECASE | re.DOTALL)
"""A statement that adds no row and computes no value, such as ``SET amount = (amount + 1)``."""
_SHOWN: Final = 200  # characters of a statement
_ADVICE: Final = {
    "unprotected": "Nothing protects this endpoint, so a client that retries does it twice. "
    "Protect it with IdempotentViewMixin, @idempotent or a policy under IdempotencyMiddleware. If "
    "it is harmless, mark the view with @idempotency_exempt.",
    "protected": "The endpoint is protected, but this happens outside of what is protected: in a "
    "middleware, an authentication, a permission or dispatch(), for example. Move it into the "
    "handler. Or the request has ended the session that names its caller, so that the retry is "
    "another caller's. Refuse callers who are not logged in.",
    "unkeyed": "The endpoint is protected, but not for this request: it has no key, or the "
    "policy leaves it out. Send a key, or require one.",
}


class _Test:
    """A test that runs, and what was found in it."""

    def __init__(self, item: pytest.Item) -> None:
        self.name = item.nodeid
        self.is_off = item.get_closest_marker(OFF) is not None
        self.ignore = frozenset(item.config.getini(IGNORE))
        self.counts = Counter(unsafe=0, sent=0, found=0)
        self.findings: list[str] = []

    def find(self, request: str, effects: Iterable[str], advice: str) -> None:
        """Keep a finding, once."""
        shown = "\n".join(f"    {' '.join(effect.split())[:_SHOWN]}" for effect in effects)
        found = f"{request} of {self.name} was sent again, and had an effect:\n{shown}\n{advice}"
        if found not in self.findings:
            self.findings.append(found)

    def fail(self) -> None:
        """Fail the test if it, or a fixture that ends, has new findings."""
        findings, self.findings = self.findings, []
        self.counts["found"] += len(findings)
        if findings:
            pytest.fail("\n\n".join(findings), pytrace=False)


class Replays:
    """Sends the unsafe requests of each test twice, and fails the test where it finds something."""

    def __init__(self) -> None:
        self._test: _Test | None = None
        self._undo = ExitStack()
        self._counts: Counter[str] = Counter()

    # The client.

    def pytest_sessionstart(self) -> None:
        """Put ourselves between the tests' clients and the project."""
        self._undo.enter_context(patch.object(Client, "request", self._twice(Client.request)))

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
                if any(each.force_debug_cursor for each in connections.all()):
                    return send(client, **environ)  # the test counts queries: a key adds some
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
            with rehearsal(test.ignore) as effects, suppress(Exception):  # the retry's own
                send(retrying, **{**environ, BODY: FakePayload(body)})
            if not is_protected and environ["REQUEST_METHOD"] in _OVERWRITING:
                effects = [each for each in effects if not _OVERWRITES.match(each)]
            if effects:
                line = f"{environ['REQUEST_METHOD']} {_path(environ)}"
                test.find(line, effects, _advice(endpoint, is_protected=is_protected))
            return response

        return request

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
        """Count, also for the process that starts the others of pytest-xdist."""
        report = yield
        if self._test and report.when == "teardown":
            setattr(report, OPTION, dict(self._test.counts))
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
def _noting_claims() -> Iterator[set[str]]:
    """The scopes in which the block claims a key: what it does is protected."""
    scopes: set[str] = set()

    def note(operation: Operation, **_: Any) -> None:
        scopes.add(operation.scope)

    signals.claimed.connect(note)
    try:
        yield scopes
    finally:
        signals.claimed.disconnect(note)


def _is_worth_a_retry(first: Any, *, is_protected: bool) -> bool:
    """Whether a retry must not have an effect: after an error, for one, it may."""
    status = first.status_code
    if status >= 500 or status in NEVER_STORED or (status >= 400 and not is_protected):
        return False
    if "stored=?0" in first.get(STATUS_HEADER, "") and status >= 400:
        return False  # the handler has raised it, so a retry is executed
    return not any(each.in_atomic_block and each.needs_rollback for each in connections.all())


def _takes_key(client: Any, environ: dict[str, Any], endpoint: Endpoint) -> bool:
    """Whether the request has no key, and its endpoint takes one, but does not need it."""
    header, policy = meta_name(conf.header), (endpoint.policy or Policy()).resolved()
    if header in environ or header in client.defaults or endpoint.problem or not endpoint.how:
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
