"""A payments API without Django, in any dialect, with faults that can be switched on.

``POST /charges`` and ``POST /refunds`` have an effect; ``GET /effects?reference=…`` counts them.
``GET /restart`` does what a restart does. The faults are those of
published libraries, one at a time.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from select import select
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from idempotency_django.conformance.catalogue import Dialect

TOKENS = {"Bearer alice": "alice", "Bearer bob": "bob"}
FAILING = "X-Fail"
LONGEST = 255
LARGE = 100_000
PROBLEM = "application/problem+json"
QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"(?:;.*)?')


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """``answer`` is there when the request is done."""

    fingerprint: str
    answer: Answer | None = None


class Refused(Exception):
    def __init__(self, status: int, title: str) -> None:
        super().__init__(title)
        self.status = status


class Api:
    """The WSGI application."""

    def __init__(self, dialect: Dialect, fault: str = "") -> None:
        self.dialect, self.fault = dialect, fault
        self.records: dict[tuple[str, ...], Record] = {}
        self.effects: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.meeting = Meeting()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        raw = environ["wsgi.input"].read(length)
        try:
            answer = self.answer(environ, raw, whole=len(raw) == length)
        except Refused as error:
            answer = self.refusal(error)
        except Exception as error:  # noqa: BLE001
            answer = Answer(500, str(error).encode())
        status = f"{answer.status} {HTTPStatus(answer.status).phrase}"
        start(status, [*answer.headers.items(), ("Content-Length", str(len(answer.body)))])
        return [answer.body] if environ["REQUEST_METHOD"] != "HEAD" else []

    def refusal(self, error: Refused) -> Answer:
        if str(error).startswith("<!doctype html>"):
            return Answer(error.status, str(error).encode(), {"Content-Type": "text/html"})
        headers = {"Content-Type": PROBLEM}
        if "later" in str(error) and self.fault != "conflicts without Retry-After":
            headers["Retry-After"] = "1"
        if self.fault == "errors in plain text":
            return Answer(
                error.status, str(error).encode(), headers | {"Content-Type": "text/plain"}
            )
        problem = {"type": "https://example.com/docs", "title": str(error), "status": error.status}
        return Answer(error.status, json.dumps(problem).encode(), headers)

    def answer(self, environ: dict[str, Any], raw: bytes, *, whole: bool) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == "/effects":
            [reference] = parse_qs(environ["QUERY_STRING"])["reference"]
            return self.json(200, {"counted": {"n": self.effects[reference]}})
        if path == "/restart":
            if self.fault == "forgets at a restart":
                self.records.clear()
            return Answer(204)
        caller = TOKENS.get(environ.get("HTTP_AUTHORIZATION", ""), "")
        caller = caller or ("anybody" if path == "/open" else "")
        session = re.search(r"session=(\w+)", environ.get("HTTP_COOKIE", ""))
        caller = caller or (session[1] if session else "")
        if self.fault == "replays before authentication":
            for (_, key, *_rest), record in self.records.items():
                if record.answer and key == self.header(environ).strip('"'):
                    return self.replay(record.answer)
        if not caller:
            raise Refused(401, "Who are you?")
        if method in {"GET", "HEAD"} and self.fault != "replays on GET":
            return self.json(200, {"charges": []})
        if method not in {"POST", "PUT"} and self.fault != "replays on GET":
            raise Refused(405, "POST, please.")
        body: Any = raw
        if whole or self.fault != "wedged by a client that left":
            body = self.parsed(raw, environ) if method != "GET" else {}
        if not whole and self.fault != "wedged by a client that left":
            raise Refused(400, "The body is not whole.")
        key = self.key(environ, body)
        if key is None:
            return self.perform(caller, body, environ)
        return self.once(key, caller, body, raw, environ)

    def parsed(self, raw: bytes, environ: dict[str, Any]) -> Any:
        if environ["PATH_INFO"] == "/empty":
            return {"amount": 1}
        if len(raw) > LARGE and self.fault == "fails on a large body":
            raise MemoryError
        if environ.get("CONTENT_TYPE") == "application/x-www-form-urlencoded":
            fields = {name: " ".join(values) for name, values in parse_qs(raw.decode()).items()}
            amount = fields.get("amount", "")
            return fields | {"amount": int(amount) if amount.isdigit() else amount}
        if environ["PATH_INFO"] == "/forms" and raw.startswith(b"{"):
            page = b"<!doctype html><title>KeyError\n at /forms &amp; more</title><p>Traceback"
            raise Refused(500, page.decode())
        try:
            return json.loads(raw)
        except ValueError:
            if self.fault == "fails on what is not JSON":
                raise
            raise Refused(400, "This is not JSON.") from None

    # The key

    def header(self, environ: dict[str, Any]) -> str:
        name = self.dialect.key["name"].upper().replace("-", "_")
        return str(environ.get(f"HTTP_{name}", ""))

    def key(self, environ: dict[str, Any], body: Any) -> str | None:
        where = self.dialect.key
        if where["in"] == "body":
            key = body
            for member in where["name"].split("."):
                key = key.get(member, {})
            key = None if key == {} else key
        else:
            name = where["name"].upper().replace("-", "_")
            key = environ.get(f"HTTP_{name}")
            if key is not None:
                key = self.unquoted(key)
        if key is None or (key == "" and self.fault == "takes an empty key for none"):
            if self.fault == "accepts a missing key" or key is not None:
                return None
            raise Refused(self.status("missing"), "A key is required.")
        sent = environ.get("HTTP_REPEATABILITY_FIRST_SENT", "")
        if " 2000 " in sent and self.fault != "executes what is too old":
            raise Refused(self.status("too_old"), "Sent too long ago.")
        return self.checked(str(key))

    def unquoted(self, text: str) -> str:
        if self.fault == "fails outside ASCII":
            text.encode("ascii")
        if self.fault == "takes the first of two lines":
            text = text.partition(",")[0]
        if self.fault == "takes the whole line for the key":
            return text
        if self.fault == "lenient about quotation marks":
            return text.strip('"')
        if self.dialect.key.get("form") != "quoted" or not text.startswith('"'):
            if "," in text or '"' in text:
                raise Refused(self.status("malformed"), "Two keys?")
            return text
        match = QUOTED.fullmatch(text)
        if not match:
            raise Refused(self.status("malformed"), "That is no String.")
        return match[1]

    def checked(self, key: str) -> str:
        longest = self.dialect.key.get("max", LONGEST)
        if self.fault == "cuts long keys":
            return key[:longest]
        if self.fault == "refuses the longest key":
            longest -= 1
        if not key and self.fault != "lenient about quotation marks":
            raise Refused(self.status("malformed"), "The key is empty.")
        if len(key) > longest:
            if self.fault == "fails on a long key":
                raise OverflowError
            raise Refused(self.status("malformed"), "The key is too long.")
        if not key.isascii():
            raise Refused(self.status("malformed"), "The key is not ASCII.")
        return key.lower() if self.fault == "case-insensitive keys" else key

    def status(self, name: str) -> int:
        return self.dialect.statuses[name][0]

    # Once

    def once(self, key: str, caller: str, body: Any, raw: bytes, environ: dict[str, Any]) -> Answer:
        if self.fault == "wedged by a client that left" and not isinstance(body, bytes):
            self.meeting.wait_for_others()  # or the retry might be there before the first
        scope = self.scope(key, caller, environ, raw)
        fingerprint = self.fingerprint(body, raw)
        if self.fault == "executes, then looks":
            answer = self.perform(caller, body, environ)
            record = self.records.setdefault(scope, Record(fingerprint, answer))
            return record.answer or answer
        found = self.claim(scope, fingerprint)
        self.meeting.join()
        if found:
            return self.answer_from(found, scope, fingerprint)
        if isinstance(body, bytes):
            raise Refused(400, "The body is not whole.")  # and the claim stays
        try:
            answer = self.perform(caller, body, environ)
        except Refused:
            self.records.pop(scope, None)
            raise
        kept = answer.status < 500 or self.fault == "keeps 5xx" or self.dialect.name == "stripe"
        if self.fault == "forgets 500":
            kept = answer.status < 500
        if self.fault == "forgets who left" and gone(environ):
            kept = False
        if kept:
            self.records[scope] = Record(fingerprint, answer)
        else:
            self.records.pop(scope, None)
        return answer

    def scope(self, key: str, caller: str, environ: dict[str, Any], raw: bytes) -> tuple[str, ...]:
        operation = " ".join(
            (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
        )
        match self.fault:
            case "key without user" | "others are refused":
                caller = ""
            case "key without endpoint":
                operation = f"{environ['REQUEST_METHOD']} {environ['QUERY_STRING']}"
            case "key without method":
                operation = environ["PATH_INFO"] + environ["QUERY_STRING"]
            case "replays on GET":
                operation = environ["PATH_INFO"]
            case "key without query":
                operation = environ["REQUEST_METHOD"] + environ["PATH_INFO"]
            case "another body is another request":
                return caller, key, operation, raw.decode()
            case "ignores the key":
                return caller, "", operation, json.dumps(json.loads(raw), sort_keys=True)
        return caller, key, operation

    def fingerprint(self, body: Any, raw: bytes) -> str:
        match self.fault:
            case "ignores the body" | "replays on GET":
                return ""
            case "compares bytes":
                return raw.decode(errors="replace")
        if isinstance(body, bytes):
            return ""
        name = self.dialect.key["name"].partition(".")[0]
        return json.dumps({k: v for k, v in body.items() if k != name}, sort_keys=True)

    def claim(self, scope: tuple[str, ...], fingerprint: str) -> Record | None:
        """The record that is there; or none, and then the key is claimed."""
        with self.lock:
            found = self.records.get(scope)
            if not found and self.fault != "lock around the look-up":
                self.records[scope] = Record(fingerprint)
            if found and found.answer is None and self.fault == "a duplicate frees the claim":
                self.records.pop(scope)
            return found

    def answer_from(self, found: Record, scope: tuple[str, ...], fingerprint: str) -> Answer:
        if self.fault == "waits and invents":
            return self.json(201, {"id": 0})
        if self.fault == "others are refused" and found.fingerprint != fingerprint:
            raise Refused(403, "This key is taken.")
        if found.fingerprint != fingerprint:
            if self.fault == "200 for another body":
                return self.json(200, {"error": "The key was used for another request."})
            if self.fault == "another body frees the key":
                self.records.pop(scope, None)
            raise Refused(self.status("mismatch"), "The key was used for another request.")
        if found.answer is None:
            if self.fault == "500 for a duplicate":
                raise RuntimeError
            raise Refused(self.status("in_progress"), "Come back later.")
        return self.replay(found.answer)

    def replay(self, answer: Answer) -> Answer:
        headers = {**answer.headers}
        marker = self.dialect.marker
        if marker and not marker.get("every") and self.fault != "no marker":
            headers[marker["header"]] = marker["value"]
        if self.fault == "loses Location":
            headers.pop("Location", None)
        if self.fault == "cacheable":
            headers["Cache-Control"] = "public, max-age=60"
        status = 200 if self.fault == "replays with another status" else answer.status
        return Answer(status, answer.body, headers)

    # The effect

    def perform(self, caller: str, body: Any, environ: dict[str, Any]) -> Answer:
        reference = str(body.get("reference", ""))
        valid = isinstance(body.get("amount"), int)
        if valid or self.fault == "an effect before validation":
            with self.lock:
                self.effects[reference] += 1
                number = self.effects.total()
        if not valid:
            raise Refused(400, "The amount is a number.")
        if environ.get(f"HTTP_{FAILING.upper().replace('-', '_')}"):
            if self.fault != "keeps the effect of a failure":
                self.effects[reference] -= 1
            return Answer(503, b"Down.")
        if environ["PATH_INFO"] == "/alike":
            return self.json(201, {"done": True})
        answer = self.json(201, {"id": number, "caller": caller})
        answer.headers["Location"] = f"/charges/{number}"
        answer.headers["Set-Cookie"] = f"session={caller}"
        marker = self.dialect.marker
        if marker.get("every") and self.fault != "no marker":
            key = marker["value"] == "key"
            answer.headers[marker["header"]] = self.header(environ) if key else marker["value"]
        if self.fault == "marks everything":
            answer.headers[marker["header"]] = marker["value"]
        return answer

    def json(self, status: int, document: Any) -> Answer:
        return Answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"})


class Meeting:
    """Lets requests that are there at the same time go on together, once all have looked up."""

    def __init__(self) -> None:
        self.listener: Any = None
        self.open = self.here = 0
        self.changed = threading.Condition()
        self.joined = threading.local()

    def connecting(self) -> None:
        with self.changed:
            self.open += 1

    def connected(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def left(self) -> None:
        with self.changed:
            self.open -= 1
            self.here -= getattr(self.joined, "yes", False)
            self.changed.notify_all()

    def join(self) -> None:
        with self.changed:
            self.here += 1
            self.joined.yes = True
            self.changed.notify_all()
            self.changed.wait_for(self.complete, timeout=5)

    def wait_for_others(self) -> None:
        """Return when all other requests have ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.open <= 1, timeout=5)

    def complete(self) -> bool:
        waiting, *_ = select([self.listener], [], [], 0)
        return self.here >= self.open and not waiting


def gone(environ: dict[str, Any]) -> bool:
    """Whether the client closes the connection within a moment."""
    connection = environ["client.socket"]
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    finally:
        connection.settimeout(None)


class Handler(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), "client.socket": self.connection}

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64
    meeting: Meeting

    def get_request(self) -> Any:
        self.meeting.connecting()  # before it leaves the queue, so that it is always in one of both
        return super().get_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.meeting.connected()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.meeting.left()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client has left


@contextmanager
def serving(dialect: Dialect, fault: str = "") -> Iterator[str]:
    """The URL of the API in the dialect, with the fault."""
    api = Api(dialect, fault)
    with make_server("127.0.0.1", 0, api, Server, Handler) as server:
        server.meeting = api.meeting
        server.meeting.listener = server.socket
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
