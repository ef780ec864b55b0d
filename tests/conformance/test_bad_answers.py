"""What the runner says of servers that answer with something else than it expects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count, repeat

import httpx
import pytest

from idempotency_django.conformance import runner
from idempotency_django.conformance.__main__ import main

DEEP = b"[" * 100_000
LINES = {
    301: "Moved Permanently",
    302: "Found",
    303: "See Other",
    307: "Temporary Redirect",
    308: "Permanent Redirect",
    200: "OK",
    201: "Created",
    404: "Not Found",
    500: "Internal Server Error",
}


def message(status: int, body: bytes, **headers: str) -> Iterator[bytes]:
    """A response; it ends where the connection does."""
    lines = [f"HTTP/1.1 {status} {LINES[status]}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    yield "\r\n".join([*lines, "", ""]).encode() + body


BODIES = {
    "/invalid": b'{"n": ',
    "/empty": b"",
    "/binary": b"\xff\xfe\x00\x1b[31m",
    "/list": b"[1, 2]",
    "/text": b'"many"',
    "/null": b"null",
    "/fraction": b'{"n": 1.0}',
    "/true": b'{"n": true}',
    "/deep": DEEP,
    "/digits": b'{"n": ' + b"1" * 5000 + b"}",
}


class Handler(BaseHTTPRequestHandler):
    """Answers by the path; ``/charges`` has an effect, and ``/count`` tells how many there were."""

    effects = 0
    ended: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = self.path.partition("?")[0]
        if path in ("/charges", "/done"):
            type(self).effects += 1
        self.send(path)

    def do_GET(self) -> None:
        self.send(self.path.partition("?")[0])

    def send(self, path: str) -> None:
        with suppress(OSError):  # the client has left
            for part in self.answer(path):
                self.wfile.write(part)
        self.close_connection = True

    def answer(self, path: str) -> Iterator[bytes]:
        if path in BODIES:
            return message(200, BODIES[path], Content_Type="application/json")
        match path:
            case "/charges":
                return message(201, json.dumps({"id": self.effects}).encode())
            case "/count":
                return message(200, json.dumps({"n": self.effects}).encode())
            case "/done":
                return message(303, b"", Location=f"/charges/{self.effects}")
            case "/nothing":
                return iter(())
            case "/gzip":
                return message(200, b"This is no gzip.", Content_Encoding="gzip")
            case "/endless":
                return chain(message(200, b""), repeat(b" " * 1000))
            case "/dripping":
                return chain(message(200, b""), self.drops())
            case "/nowhere":
                return message(302, b"")
            case "/broken-location":
                return message(302, b"", Location="http://[x/")
        if path.strip("/") in map(str, LINES):
            status = int(path.strip("/"))
            return message(status, b"No.\r\n\x1b[31mNo.", Location="/charges/?a=b")
        return message(404, b"")

    def drops(self) -> Iterator[bytes]:
        for _ in count():
            if self.ended.wait(0.02):
                return
            yield b" "

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(runner, "PATIENCE", 1.0)
    monkeypatch.setattr(runner, "LARGEST", 200_000)
    ended = threading.Event()
    handler = type("Handler", (Handler,), {"ended": ended})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        ended.set()
        server.shutdown()
        thread.join()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said if it ends with 2 and without a report; it has no second line."""
    assert main([*arguments, "--body", "{}"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    [line] = captured.err.splitlines()
    assert line.isprintable()
    return line


class TestRedirects:
    @pytest.mark.parametrize("status", sorted(runner.REDIRECTS))
    def test_refused(self, server: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
        """An endpoint that redirects is not tested; the sentence has the URL to give instead."""
        said = refused(capsys, f"{server}/{status}")
        assert said.startswith(
            f"POST {server}/{status} answers {status}, a redirect to {server}/charges/?a=b. The "
            "runner follows no redirects: give that URL instead. "
        )

    def test_without_an_effect(self, server: str, capsys: pytest.CaptureFixture[str]) -> None:
        """So it is if a count says that nothing happened."""
        counting = ["--count", f"{server}/count", "/n"]
        assert "answers 301, a redirect to" in refused(capsys, f"{server}/301", *counting)

    def test_after_an_effect(self, server: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A redirect after an effect that the count shows is the response, as a form has it."""
        arguments = [f"{server}/done", "--body", "{}", "--only", "IDEM-002"]
        assert main([*arguments, "--count", f"{server}/count", "/n"]) == 1
        assert "effects: 3, not 1" in capsys.readouterr().out  # nothing protects it

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("/nowhere", "answers 302, a redirect without a Location."),
            ("/broken-location", "a redirect to http://[x/. The runner"),
        ],
    )
    def test_bad_location(
        self, server: str, path: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert text in refused(capsys, f"{server}{path}")

    def test_other_endpoint(self, server: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The other endpoint must not redirect, either: it would never get the first response."""
        other = ["--other-url", f"{server}/308", "--only", "IDEM-024"]
        assert f"POST {server}/308 answers 308" in refused(capsys, f"{server}/charges", *other)


@pytest.mark.parametrize("path", BODIES)
def test_any_body(server: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A response may have any body."""
    arguments = [f"{server}{path}", "--body", "{}", "--other-body", "[1]", "--required"]
    chosen = [f"--only=IDEM-{each:03}" for each in (1, 2, 3, 7, 10, 20, 42, 47)]
    assert main([*arguments, *chosen]) == 1
    assert "8 requirements: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/nothing", "the connection failed: Server disconnected without sending a response."),
        ("/gzip", "the body is not what its Content-Encoding says: "),
        ("/endless", "the response has more than 200000 bytes"),
        ("/dripping", "no response within 0.3 s"),
        ("/404", "answers 404 to the request itself: No. \ufffd[31mNo.. Correct its body,"),
        ("/500", "answers 500 to the request itself: No. "),
        ("/", "answers 404 to the request itself: an empty body. "),
    ],
)
def test_no_response(server: str, path: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the request itself gets no response that can be used, it ends with 2 and says why."""
    said = refused(capsys, f"{server}{path}", "--timeout", "0.3")
    assert said.startswith(f"POST {server}{path}")
    assert text in said


@pytest.mark.parametrize(
    ("path", "pointer", "text"),
    [
        ("/nothing", "/n", "the connection failed: Server disconnected"),
        ("/gzip", "/n", "the body is not what its Content-Encoding says: "),
        ("/endless", "/n", "the response has more than 200000 bytes"),
        ("/dripping", "/n", "no response within 0.3 s"),
        ("/500", "/n", "it answers 500: No. "),
        ("/201", "/n", "it answers 201: No. "),
        ("/307", "/n", "it answers 307, a redirect to "),
        ("/invalid", "/n", 'it answers with what is not JSON: {"n":.'),
        ("/empty", "/n", "it answers with what is not JSON: an empty body."),
        ("/binary", "/n", "it answers with what is not JSON: \ufffd\ufffd\ufffd\ufffd[31m."),
        ("/deep", "/n", "it answers with what is not JSON: [[["),
        ("/digits", "/n", 'it answers with what is not JSON: {"n": 111'),
        ("/list", "/n", "its JSON has nothing at '/n': [1, 2]."),
        ("/list", "/2", "its JSON has nothing at '/2': [1, 2]."),
        ("/text", "/n", "its JSON has nothing at '/n': \"many\"."),
        ("/null", "/n", "its JSON has nothing at '/n': null."),
        ("/count", "/n/m", "its JSON has nothing at '/n/m': {\"n\": 0}."),
        ("/text", "", "the value at '' is not an integer: \"many\"."),
        ("/fraction", "/n", "the value at '/n' is not an integer: {\"n\": 1.0}."),
        ("/true", "/n", "the value at '/n' is not an integer: {\"n\": true}."),
    ],
)
def test_no_count(
    server: str, path: str, pointer: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the effects can't be counted, it names the request, the response, and what it expects."""
    counting = ["--count", f"{server}{path}", pointer]
    said = refused(capsys, f"{server}/charges", *counting, "--timeout", "0.3")
    assert said.startswith(f"The effects can't be counted: GET {server}{path}: ")
    assert text in said
    assert said.endswith(
        f"The response must be JSON with an integer at {pointer!r} (--count URL POINTER)."
    )


def test_deep_problem() -> None:
    """A problem document that no parser reads is none."""
    headers = httpx.Headers({"Content-Type": "application/problem+json"})
    assert runner._no_problem(runner.Response("POST", 400, headers, DEEP)) == "is not JSON"
