"""Runs the steps of requirements against an API, and judges its responses."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from html import unescape
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import httpx

from .catalogue import Dialect, Effects, Expect, Requirement, Restart, Send

PATIENCE: Final = 60.0
"""Seconds that a patient step waits for a response, and a restart for a connection."""
SETTLING: Final = 0.5
"""Seconds after which effects are counted, if a client left and its request may still run."""
OVERLONG: Final = 1000
"""Characters of a key that is too long, where the dialect has no limit."""
LARGE: Final = 1 << 19
"""Bytes that a large body has more than the usual one."""
LARGEST: Final = 1 << 24
"""Bytes of a response's body that are read."""
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
CREDENTIALS: Final = frozenset({"authorization", "cookie", "x-api-key"})
"""Names of headers that are left out for the anonymous caller, if no other caller is given."""

Result = Literal["passed", "failed", "not tested"]
Value = TypeVar("Value")


class TargetError(Exception):
    """The API, or what was said about it, does not allow any test; the text says why."""


class NotTested(Exception):
    """Something that the requirement needs is missing; the text says what."""


class NotMet(Exception):
    """The API does not do what the requirement says; the text says what it did."""


@dataclass(frozen=True)
class Count:
    """Where the number of effects is: a URL for GET, and a JSON pointer (RFC 6901) in its body."""

    url: str
    pointer: str = ""


@dataclass(frozen=True)
class Target:
    """An endpoint of an API, and what is known of it.

    ``{unique}`` in the URLs, bodies and header values is replaced by a text that is new for each
    run of a requirement.

    Args:
        url: the endpoint. Each test sends requests that have an effect there.
        method: of the request.
        body: of the request: JSON data, or text that is sent as it is. ``None``: no body.
        other_body: another valid body, which asks for something else.
        invalid_body: a body that the API refuses with 4xx.
        form: whether JSON objects are sent as forms instead.
        headers: of the request, including the caller's credentials.
        other_headers: the headers of another caller that differ.
        failing_headers: headers that make the API fail with 5xx.
        slow_headers: headers that make the API work longer, for requests that run at the same time.
        other_url: another endpoint that takes keys.
        count: where to count effects.
        required: whether the API requires a key; ``None``: unknown.
        restart: a command that restarts the API.
        timeout: seconds for each response.
    """

    url: str
    method: str = "POST"
    body: Any = None
    other_body: Any = None
    invalid_body: Any = None
    form: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    other_headers: Mapping[str, str] = field(default_factory=dict)
    failing_headers: Mapping[str, str] = field(default_factory=dict)
    slow_headers: Mapping[str, str] = field(default_factory=dict)
    other_url: str = ""
    count: Count | None = None
    required: bool | None = None
    restart: str = ""
    timeout: float = 30.0


@dataclass(frozen=True)
class Response:
    """What came back."""

    method: str
    status: int
    headers: httpx.Headers
    body: bytes
    url: str = ""

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 400

    @property
    def told(self) -> tuple[bytes, str]:
        """What tells one execution from another."""
        return self.body, self.headers.get("location", "")


@dataclass(frozen=True)
class Verdict:
    """What a requirement came to.

    Attributes:
        reason: why it failed or was not tested; empty if it passed.
        exchanges: one line for each request and its response.
    """

    requirement: Requirement
    result: Result
    reason: str = ""
    exchanges: tuple[str, ...] = ()


class Runner:
    """Tests one endpoint in one dialect.

    Args:
        target: the endpoint.
        dialect: how it spells keys and refusals.

    Raises:
        TargetError: the endpoint does not do its work even without any fault, or the values
            contradict each other.
    """

    def __init__(self, target: Target, dialect: Dialect) -> None:
        if dialect.key["in"] == "body" and not isinstance(target.body, dict):
            raise TargetError(
                f"The dialect {dialect.name} has its key in the body: give a JSON object as the "
                "body (--body)."
            )
        self.target, self.dialect = target, dialect
        # A connection for each request: no server can close one that is about to be used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        # No cookie is kept: the other callers would send the first caller's session.
        jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._client = httpx.Client(timeout=target.timeout, limits=limits, cookies=jar)
        self._redirects = False
        self._tells_apart = self._calibrate()

    def verdict(self, requirement: Requirement) -> Verdict:
        """Test one requirement."""
        passed: _Run | None = None
        reason = ""
        for _ in range(requirement.repeat):
            run = _Run(self, requirement)
            try:
                run.steps()
            except NotTested as error:
                reason = str(error)
            except NotMet as error:
                return Verdict(requirement, "failed", str(error), tuple(run.exchanges))
            else:
                passed = run
        if passed is None:
            return Verdict(requirement, "not tested", reason)
        return Verdict(requirement, "passed", exchanges=tuple(passed.exchanges))

    def _calibrate(self) -> bool:
        """Try the request itself; return whether responses tell one execution from another."""
        run = _Run(self, None)
        responses = []
        for key in ("{k}", "{k2}"):
            try:
                [response] = run.send(Send("usual", key=key))
            except (NotMet, NotTested) as error:
                raise TargetError(f"{self.target.method} {self.target.url}: {error}") from error
            responses.append(response)
        first, second = responses
        if not first.succeeded:
            raise TargetError(
                f"{self.target.method} {self.target.url} answers {first.status} to the request "
                f"itself: {_said(first)}. Correct its body, headers or dialect. If the API takes "
                "forms, pass --form."
            )
        counted, most = run.counted(), 1 + second.succeeded
        self._redirects = first.status in REDIRECTS and bool(counted)
        self.refuse_redirect(first)
        if counted is not None and not 1 <= counted <= most:
            raise TargetError(
                f"{most} requests with different keys were successful, and the count grew by "
                f"{counted}. Check the URL and the pointer of the count, and that nothing else "
                "changes it meanwhile. '{unique}' in the body and in the count's URL keeps each "
                "test apart."
            )
        return second.succeeded and first.told != second.told

    def refuse_redirect(self, response: Response) -> None:
        """Refuse an endpoint that is elsewhere.

        A form may answer with a redirect after its effect. Only a count tells that apart.
        """
        if response.status not in REDIRECTS or self._redirects:
            return
        raise TargetError(
            f"{response.method} {response.url} {_redirected(response)} If that is a login page, "
            "give credentials (--header). If the request had its effect, count the effects "
            "(--count)."
        )

    def request_of(self, step: Send, values: Mapping[str, str], body_kind: str) -> httpx.Request:
        """The request that a step asks for."""
        url, method = self._url(step), step.method or self.target.method
        if step.method == self.target.method:
            raise NotTested(f"the request itself has the method {method}")
        headers = self._headers(step)
        body = self._body(body_kind)
        lines: list[tuple[str, str]] = []
        if step.key is not None:
            lines, body = self._with_key(step, body, values)
        content, media_type = _encoded(body, body_kind, form=self.target.form)
        if content and not any(name.lower() == "content-type" for name in headers):
            headers["Content-Type"] = media_type
        if body_kind == "text":
            headers["Content-Type"] = "text/plain"
        sent = [
            (_filled(name, values).encode(), _filled(value, values).encode())
            for name, value in [*headers.items(), *lines]
        ]
        filled = _filled(content.decode(), values).encode()
        return self._client.build_request(
            method, _filled(url, values), headers=sent, content=filled
        )

    def _url(self, step: Send) -> str:
        url = self.target.url
        match step.target:
            case "other":
                return _needed(self.target.other_url, "no other endpoint (--other-url)")
            case "query":
                return f"{url}{'&' if urlsplit(url).query else '?'}conformance=1"
        return url

    def _headers(self, step: Send) -> dict[str, str]:
        headers = dict(self.target.headers)
        other = self.target.other_headers
        if step.caller == "other":
            headers = _over(headers, _needed(other, "no other caller (--other-header)"))
        elif step.caller == "anonymous":
            named = {name.lower() for name in other} or CREDENTIALS
            kept = {name: value for name, value in headers.items() if name.lower() not in named}
            _needed(len(kept) < len(headers), "the request has no credentials (--header)")
            headers = kept
        if step.times > 1:
            headers = _over(headers, self.target.slow_headers)
        if step.headers == "failing":
            given = self.target.failing_headers
            return _over(headers, _needed(given, "no headers that make it fail (--failing-header)"))
        assert isinstance(step.headers, dict)  # noqa: S101  # the catalogue has checked it
        return _over(headers, step.headers)

    def _body(self, kind: str) -> Any:
        target = self.target
        match kind:
            case "other":
                return _needed(target.other_body, "no other body (--other-body)")
            case "invalid":
                return _needed(target.invalid_body, "no invalid body (--invalid-body)")
            case "text":
                return "This is not JSON."
            case "none":
                return None
            case "reordered" | "spaced" | "large":
                _needed(isinstance(target.body, dict), "the body is not a JSON object")
                if kind == "reordered":
                    _needed(len(target.body) > 1, "the body has only one member")
        return target.body

    def _with_key(
        self, step: Send, body: Any, values: Mapping[str, str]
    ) -> tuple[list[tuple[str, str]], Any]:
        """The header lines of the key, and the body with it: one of the two has it."""
        key = self.dialect.key
        texts = [_filled(text, values) for text in _listed(step.key)]
        if key["in"] == "body":
            return [], _with_member(body, key["name"], texts[0])
        form = step.form or key.get("form", "bare")
        lines = [(key["name"], _quoted(text) if form == "quoted" else text) for text in texts]
        first_sent = key.get("first_sent")
        if first_sent and (isinstance(step.headers, str) or first_sent not in step.headers):
            lines.append((first_sent, values["{first_sent}"]))
        return lines, body

    def deliver(
        self, request: httpx.Request, leave: str = "", gate: threading.Barrier | None = None
    ) -> Response | None:
        """Send a request; return the response, or ``None`` if the client left before."""
        content = request.content
        if gate is not None or leave == "within-request":
            if not content:
                raise NotTested("the request has no body")
            part = _held_back(content, gate) if gate is not None else _cut(content)
            request = self._client.build_request(
                request.method, request.url, headers=request.headers.raw, content=part
            )
        if leave == "after-request":
            timeouts = httpx.Timeout(self.target.timeout, read=0.01).as_dict()
            request.extensions["timeout"] = timeouts
        try:
            with closing(self._client.send(request, stream=True)) as answered:
                if leave == "after-request":
                    return None
                body = self._read(answered)
        except _ClientLeft:
            return None
        except httpx.ReadTimeout as error:
            if leave == "after-request":
                return None
            raise NotMet(f"no response within {self.target.timeout:g} s") from error
        except httpx.DecodingError as error:
            raise NotMet(f"the body is not what its Content-Encoding says: {error}") from error
        except httpx.TransportError as error:
            raise NotMet(f"the connection failed: {str(error) or type(error).__name__}") from error
        finally:
            if gate is not None:
                gate.abort()  # it is passed, or this one never came to it
        status, url = answered.status_code, str(request.url)
        return Response(request.method, status, answered.headers, body, url)

    def _read(self, answered: httpx.Response) -> bytes:
        """The body, which may have no end."""
        body = bytearray()
        deadline = time.monotonic() + self.target.timeout
        for chunk in answered.iter_bytes():
            body += chunk
            if len(body) > LARGEST:
                raise NotMet(f"the response has more than {LARGEST} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("")
        return bytes(body)

    def count(self, values: Mapping[str, str]) -> int | None:
        """How many effects there are now; ``None`` if nothing counts them."""
        if self.target.count is None:
            return None
        url, pointer = _filled(self.target.count.url, values), self.target.count.pointer
        headers = [
            (name.encode(), _filled(value, values).encode())
            for name, value in self.target.headers.items()
        ]
        try:
            response = self.deliver(self._client.build_request("GET", url, headers=headers))
            assert response is not None  # noqa: S101  # the client did not leave
            return _counted(response, pointer)
        except NotMet as error:
            raise TargetError(
                f"The effects can't be counted: GET {url}: {error}. The response must be JSON with "
                f"an integer at {pointer!r} (--count URL POINTER)."
            ) from error

    def restart(self) -> None:
        """Restart the API, and wait until it accepts connections."""
        command = _needed(self.target.restart, "no command that restarts the API (--restart)")
        try:
            subprocess.run(shlex.split(command), check=True)  # noqa: S603  # the user's own command
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as error:
            raise TargetError(f"The API was not restarted: {error}") from error
        at = urlsplit(self.target.url)
        address = (at.hostname or "", at.port or (443 if at.scheme == "https" else 80))
        deadline = time.monotonic() + PATIENCE
        while not _accepts(address):
            if time.monotonic() > deadline:
                raise TargetError(f"The restarted API accepts no connections at {address}.")
            time.sleep(0.05)

    @property
    def tells_apart(self) -> bool:
        return self._tells_apart


class _Run:
    """One run of a requirement's steps, with keys of its own."""

    def __init__(self, runner: Runner, requirement: Requirement | None) -> None:
        self._runner, self._requirement = runner, requirement
        longest = runner.dialect.key.get("max")
        new = _uuid7 if runner.dialect.key.get("format") == "uuid7" else uuid.uuid4
        key, key2, unique = str(new()), str(new()), uuid.uuid4().hex
        long = key.ljust(longest + 1 if longest else OVERLONG, "a")
        self._values = {
            "{k}": key,
            "{k2}": key2,
            "{K}": key.upper(),
            "{long}": long,
            "{long2}": f"{long[:-1]}b",
            "{unique}": unique,
            "{first_sent}": formatdate(usegmt=True),  # a retry repeats it
        }
        if longest:
            self._values["{max}"] = key.ljust(longest, "a")
        self._responses: dict[str, list[Response]] = {}
        self._left = False
        self.exchanges: list[str] = []
        self._before = runner.count(self._values)

    def steps(self) -> None:
        """Run them all; a failed expectation counts more than one that was not tested."""
        assert self._requirement is not None  # noqa: S101
        untested: NotTested | None = None
        for step in self._requirement.steps:
            try:
                match step:
                    case Send():
                        self._responses[step.send] = self.send(step)
                    case Restart():
                        self._runner.restart()
                    case Expect():
                        self._expect(step)
                    case Effects():
                        self._expect_effects(step)
            except NotTested as error:
                if isinstance(step, Send | Restart):
                    raise
                untested = untested or error
        if untested:
            raise untested

    # Sending

    def send(self, step: Send) -> list[Response]:
        """The responses to a step's requests."""
        self._check_values(step)
        bodies = step.bodies
        requests = [
            self._runner.request_of(step, self._values, bodies[number % len(bodies)])
            for number in range(step.times)
        ]
        self._left = self._left or bool(step.leave)
        if step.times == 1:
            responses = [self._patiently(step, requests[0])]
        else:
            gate = threading.Barrier(step.times)
            with ThreadPoolExecutor(step.times) as pool:
                sent = [pool.submit(self._runner.deliver, one, gate=gate) for one in requests]
            responses = [one.result() for one in sent]
        self._note(step, requests[0], responses)
        if step.target == "other":
            for response in filter(None, responses):
                self._runner.refuse_redirect(response)
        return [response for response in responses if response is not None]

    def _patiently(self, step: Send, request: httpx.Request) -> Response | None:
        deadline = time.monotonic() + PATIENCE
        while True:
            response = self._runner.deliver(request, step.leave)
            running = self._runner.dialect.numbers(["in_progress"])
            if not step.patient or response is None or response.status not in running:
                return response
            if time.monotonic() > deadline:
                raise NotMet(f"still {response.status} after {PATIENCE:g} s")
            wait = response.headers.get("retry-after", "")
            time.sleep(min(float(wait), 5.0) if re.fullmatch(r"\d+", wait) and wait != "0" else 0.1)

    def _check_values(self, step: Send) -> None:
        """Leave out steps whose key the dialect does not define."""
        if "{max}" not in self._values and "{max}" in _listed(step.key):
            raise NotTested("the dialect has no greatest length of a key")
        if step.required and not (self._runner.target.required or self._runner.dialect.required):
            raise NotTested("it is not known that a key is required (--required)")

    def _note(
        self, step: Send, request: httpx.Request, responses: Sequence[Response | None]
    ) -> None:
        """One line for the report. It has no header, since one of them has the credentials."""
        key = ", ".join(_listed(step.key)) if step.key is not None else "none"
        told = Counter(
            "the client left"
            if response is None
            else f"{response.status}{' (marked)' * self._marked(response)}"
            for response in responses
        )
        many = ", ".join(f"{number} × {each}" for each, number in told.items())
        what = "".join(
            f", {name} {value}"
            for name, value, usual in (
                ("body", " and ".join(step.bodies), "usual"),
                ("caller", step.caller, "first"),
            )
            if value != usual
        )
        at = f"{request.method} {request.url.raw_path.decode()}"
        result = many if step.times > 1 else next(iter(told))
        self.exchanges.append(f"{step.send}: {at}, key {key}{what}: {result}")

    # Judging

    def _expect(self, step: Expect) -> None:
        responses = self._named(step.expect)
        if step.when:
            allowed = self._numbers(step.when)
            responses = [each for each in responses if each.status in allowed]
            if not responses:
                raise NotTested(f"no response had the status {_text(step.when)}")
        if step.some and not any(each.status in self._numbers(step.some) for each in responses):
            raise NotMet(f"none of {step.expect} has the status {_text(step.some)}")
        for response in responses:
            self._judge(step, response)

    def _judge(self, step: Expect, response: Response) -> None:
        name = step.expect
        if step.status and response.status not in (allowed := self._numbers(step.status)):
            wanted = _text(step.status)
            numbers = ", ".join(map(str, sorted(allowed))) if len(allowed) < 5 else ""
            raise NotMet(
                f"{name} is {response.status}, not {wanted}" + f" ({numbers})" * bool(numbers)
            )
        for what in step.same:
            wanted, got = (_part(each, what) for each in (self._first(step.as_), response))
            if wanted != got:
                found, asked = (_shortened(repr(each)) for each in (got, wanted))
                raise NotMet(f"{name} has another {what} than {step.as_}: {found}, not {asked}")
        if step.marked is not None:
            self._expect_mark(step, response)
        if step.header and step.header not in response.headers:
            raise NotMet(f"{name} ({response.status}) has no header {step.header}")
        if step.own:
            self._expect_own(step, response)
        if step.problem and (reason := _no_problem(response)):
            raise NotMet(f"{name} ({response.status}) {reason}")
        if step.uncached and (reason := _cacheable(response)):
            raise NotMet(f"{name} may be kept by caches: {reason}")

    def _expect_mark(self, step: Expect, response: Response) -> None:
        marker = self._runner.dialect.marker
        if not step.marked and (not marker or marker.get("every")):
            return
        if not marker:
            raise NotTested("the dialect has no marker of a replay")
        if self._marked(response) != step.marked:
            has = "has" if not step.marked else "does not have"
            raise NotMet(f"{step.expect} {has} {marker['header']}: {marker['value']}")

    def _expect_own(self, step: Expect, response: Response) -> None:
        name, first = step.expect, self._first(step.own)
        if not self._runner.dialect.marker.get("every") and self._marked(response):
            raise NotMet(f"{name} is marked as a replay")
        if not response.succeeded or response.told != first.told:
            return
        if self._runner.tells_apart:
            raise NotMet(f"{name} is the response of {step.own}")
        effects = self.counted()
        if effects is None or response.method != first.method:
            raise NotTested("two executions get the same response: count the effects (--count)")
        executed = sum(map(len, self._responses.values()))
        if effects < executed:
            raise NotMet(f"{name} was not executed: {executed} requests, {effects} effects")

    def _expect_effects(self, step: Effects) -> None:
        if self._left:
            time.sleep(SETTLING)
        effects, allowed = self.counted(), step.allowed
        wanted = str(allowed[0]) if len(allowed) == 1 else f"{allowed[0]} to {allowed[-1]}"
        if effects is not None:
            if effects not in allowed:
                raise NotMet(f"effects: {effects}, not {wanted}")
            return
        if self._runner.tells_apart:
            method = self._runner.target.method
            succeeded = (each for each in self._all() if each.succeeded and each.method == method)
            if (seen := len({each.told for each in succeeded})) > allowed[-1]:
                raise NotMet(f"{seen} different successful responses, so as many effects")
        if not step.if_counted:
            raise NotTested("the effects are not counted (--count)")

    def counted(self) -> int | None:
        """How many effects there were since the start; ``None`` if nothing counts them."""
        now = self._runner.count(self._values)
        return None if now is None or self._before is None else now - self._before

    def _all(self) -> Iterator[Response]:
        for responses in self._responses.values():
            yield from responses

    def _named(self, name: str) -> list[Response]:
        return self._responses[name]

    def _first(self, name: str) -> Response:
        """The first successful response of that name, or the first of them."""
        responses = self._named(name)
        return next((each for each in responses if each.succeeded), responses[0])

    def _numbers(self, names: list[int | str]) -> set[int]:
        numbers = self._runner.dialect.numbers(names)
        if not numbers:
            raise NotTested(f"the dialect does not say the status of {_text(names)}")
        return numbers

    def _marked(self, response: Response) -> bool:
        marker = self._runner.dialect.marker
        if not marker:
            return False
        got = response.headers.get(marker["header"], "").strip().strip('"').lower()
        return bool(got) if marker["value"] == "key" else got == marker["value"]


def check_url(what: str, url: str) -> None:
    """Refuse a URL that no request can be sent to."""
    if re.match(r"https?://[^/?#]*@", url):
        raise TargetError(f"{what} has credentials. Send them in a header (--header).")
    if not re.match(r"https?://[^/]", url):
        raise TargetError(f"{what} is not one of http or https: {url!r}.")
    try:
        _ = urlsplit(url).port  # raises ValueError
        httpx.URL(url).raw_host.decode().encode("idna")
    except (ValueError, httpx.InvalidURL) as error:
        raise TargetError(f"{what} is not valid: {url!r} ({error}).") from error


class _ClientLeft(Exception):
    """Ends a request in the middle."""


def _accepts(address: tuple[str, int]) -> bool:
    """Whether a server accepts connections there."""
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def _held_back(content: bytes, gate: threading.Barrier) -> Iterator[bytes]:
    """All of the body but its last byte, and that when all other requests are as far."""
    yield content[:-1]
    with suppress(threading.BrokenBarrierError):  # another one could not be sent
        gate.wait(PATIENCE)
    yield content[-1:]


def _cut(content: bytes) -> Iterator[bytes]:
    """Half of the body."""
    yield content[: len(content) // 2]
    raise _ClientLeft


def _said(response: Response) -> str:
    """What a response says, in short: of a page, the title."""
    text = response.body.decode(errors="replace")
    if "html" in response.headers.get("content-type", ""):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.DOTALL | re.IGNORECASE)
        return f"a page, {' '.join(unescape(title[1]).split())!r}" if title else "a page"
    line = " ".join(text[:300].split())
    return "".join(each if each.isprintable() else "\ufffd" for each in line) or "an empty body"


def _redirected(response: Response) -> str:
    """What a redirect says, and what to do."""
    to = response.headers.get("location")
    if not to:
        return f"answers {response.status}, a redirect without a Location."
    with suppress(ValueError):  # it is no URL
        to = urljoin(response.url, to)
    return (
        f"answers {response.status}, a redirect to {to}. The runner follows no redirects: give "
        "that URL instead."
    )


def _counted(response: Response, pointer: str) -> int:
    """The number of effects in a response."""
    if response.status in REDIRECTS:
        raise NotMet(f"it {_redirected(response).rstrip('.')}")
    if response.status != 200:
        raise NotMet(f"it answers {response.status}: {_said(response)}")
    try:
        document = json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise NotMet(f"it answers with what is not JSON: {_said(response)}") from error
    try:
        number = _pointed(document, pointer)
    except (LookupError, TypeError, ValueError) as error:
        raise NotMet(f"its JSON has nothing at {pointer!r}: {_said(response)}") from error
    if not isinstance(number, int) or isinstance(number, bool):
        raise NotMet(f"the value at {pointer!r} is not an integer: {_said(response)}")
    return number


def _encoded(body: Any, kind: str, *, form: bool) -> tuple[bytes, str]:
    """The bytes of a body, and their media type."""
    if body is None:
        return b"", ""
    if isinstance(body, str):
        return body.encode(), "text/plain"
    if kind == "reordered":
        body = dict(reversed(body.items()))
    if form and isinstance(body, dict):
        if kind in ("spaced", "large"):
            raise NotTested("a form has no whitespace")
        # The braces are those of placeholders.
        return urlencode([*_fields(body)], safe="{}").encode(), "application/x-www-form-urlencoded"
    text = json.dumps(body, indent=4 if kind == "spaced" else None, ensure_ascii=False)
    if kind == "large":
        text = f"{text[:-1]}{' ' * LARGE}{text[-1]}"
    return text.encode(), "application/json"


def _fields(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a form; a list is a field for each of its items."""
    for name, given in body.items():
        for value in given if isinstance(given, list) else [given]:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _quoted(key: str) -> str:
    """The key as a String of RFC 9651."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _with_member(body: Any, path: str, value: str) -> Any:
    """The JSON body with a member; what is no object stays as it is."""
    name, _, rest = path.partition(".")
    if not isinstance(body, dict):
        return body
    return {**body, name: _with_member(body.get(name, {}), rest, value) if rest else value}


def _uuid7() -> uuid.UUID:
    """A UUID that begins with the time in milliseconds (RFC 9562)."""
    number = (time.time_ns() // 10**6) << 80 | secrets.randbits(80)
    return uuid.UUID(int=number & ~(0xF000 << 64 | 0xC000 << 48) | 0x7000 << 64 | 0x8000 << 48)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _over(headers: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Headers with others in their place; the case of a name makes no difference."""
    replaced = {name.lower() for name in more}
    kept = {name: value for name, value in headers.items() if name.lower() not in replaced}
    return {**kept, **more}


def _needed(value: Value | None, otherwise: str) -> Value:
    if not value:
        raise NotTested(otherwise)
    return value


def _listed(key: str | list[str] | None) -> list[str]:
    return [key] if isinstance(key, str) else key or []


def _text(names: Iterable[int | str]) -> str:
    return " or ".join(str(name) for name in names)


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"


def _part(response: Response, what: str) -> Any:
    match what:
        case "status":
            return response.status
        case "body":
            return response.body
    return response.headers.get(what)


def _pointed(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer (RFC 6901)."""
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def _no_problem(response: Response) -> str:
    """Why a response is no problem document with a link to documentation; empty if it is one."""
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/problem+json":
        return f"is {media_type or 'of no media type'}, not application/problem+json"
    try:
        problem = json.loads(response.body)
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(problem, dict):
        return "is not a JSON object"
    if problem.get("status", response.status) != response.status:
        return f"has the member status {problem['status']!r}"
    if problem.get("type", "about:blank") == "about:blank" and "link" not in response.headers:
        return "has neither a type nor a Link header that leads to documentation"
    return ""


def _cacheable(response: Response) -> str:
    """What lets caches keep a response to an unsafe method; empty if nothing does."""
    control = response.headers.get("cache-control", "").lower()
    if "no-store" in control:
        return ""
    if "age" in response.headers:
        return "it has the header Age"
    lives = re.search(r"\b(?:s-maxage|max-age)\s*=\s*\"?0*[1-9]\d*", control)
    if lives or re.search(r"\bpublic\b", control):
        return f"Cache-Control: {control}"
    return ""
