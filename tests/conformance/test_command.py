"""``python -m idempotency_django.conformance``, and what it does when something is missing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import httpx
import pytest

from idempotency_django.conformance import runner
from idempotency_django.conformance.__main__ import main
from idempotency_django.conformance.catalogue import (
    CatalogueError,
    dialect_of,
    dialects,
    requirements,
    requirements_in,
)
from tests.conformance.api import serving
from tests.servers import free_port

BODY = '{"amount": 5, "reference": "{unique}"}'
OTHER_BODY = '{"amount": 6, "reference": "{unique}"}'
ALICE = ["--body", BODY, "--header", "Authorization: Bearer ${TOKEN}"]
RETRY = ["--only", "IDEM-001"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "alice")
    monkeypatch.setattr(runner, "PATIENCE", 1.0)


@pytest.fixture
def api() -> Iterator[str]:
    """An API without a fault."""
    with serving(dialects()["ietf"]) as url:
        yield url


def counting(url: str) -> list[str]:
    return ["--count", f"{url}/effects?reference={{unique}}", "/counted/n"]


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the reports by their ids."""
    code = main([*arguments, "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    return code, {each["id"]: each for each in document["requirements"]}


class TestReport:
    def test_text(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The report has a line for each requirement, the reason, and the numbers."""
        code = main([f"{api}/charges", *ALICE, *RETRY, "--only", "IDEM-030"])

        out = capsys.readouterr().out
        assert code == 0
        assert "IDEM-001  ok          SHOULD  A retry gets the status and the body" in out
        assert "IDEM-030  not tested  MUST " in out
        assert "no other caller (--other-header)\n" in out
        assert "2 requirements: 1 passed, 0 failed, 1 not tested.\n" in out

    def test_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A failed requirement shows what was sent and what came back, without the credentials."""
        with serving(dialects()["ietf"], "lock around the look-up") as url:
            code = main([f"{url}/charges", *ALICE, *counting(url), "--only", "IDEM-010"])

        out = capsys.readouterr().out
        assert code == 1
        assert "IDEM-010  FAILED      MUST    Concurrent duplicates have one effect." in out
        assert "effects: 8, not 1\n" in out
        assert "race: POST /charges, key {k}: 8 × 201\n" in out
        assert "\n1 requirement: 0 passed, 1 failed (1 MUST), 0 not tested." in out
        assert "alice" not in out

    def test_junit(self, capsys: pytest.CaptureFixture[str]) -> None:
        """JUnit's XML has the failures; what is not tested, and an unmet MAY, is skipped."""
        with serving(dialects()["ietf"], "no marker") as url:
            chosen = ["--only", "IDEM-001", "--only", "IDEM-004", "--only", "IDEM-030"]
            code = main([f"{url}/charges", *ALICE, *chosen, "--format", "junit"])

        suite = Xml.fromstring(capsys.readouterr().out)
        assert code == 0
        assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "0", "2")
        messages = [each.get("message") for each in suite.iter("skipped")]
        assert messages == [
            "retry does not have Idempotent-Replayed: true",
            "no other caller (--other-header)",
        ]

    def test_junit_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(dialects()["ietf"], "loses Location") as url:
            main([f"{url}/charges", *ALICE, "--only", "IDEM-003", "--format", "junit"])

        [failure] = Xml.fromstring(capsys.readouterr().out).iter("failure")
        assert str(failure.get("message")).startswith("retry has another location than first: None")
        assert str(failure.text).startswith("first: POST /charges, key {k}: 201")

    def test_level(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--fail-on must accepts an unmet SHOULD."""
        with serving(dialects()["ietf"], "loses Location") as url:
            arguments = [f"{url}/charges", *ALICE, "--only", "IDEM-003"]
            assert main(arguments) == 1
            assert main([*arguments, "--fail-on", "must"]) == 0
        assert "failed (1 SHOULD)" in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress(
    api: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_terminal: bool,
) -> None:
    """In a terminal, the requirement that is being tested is named, apart from the report."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main([f"{api}/charges", *ALICE, *RETRY, "--only", "IDEM-030", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == ("1 of 2: IDEM-001 …\n2 of 2: IDEM-030 …\n" if is_terminal else "")
    assert len(json.loads(out)["requirements"]) == 2


class TestMissing:
    """What is unknown is not tested, and never passes."""

    def test_all(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """With nothing but a request, the report says what each other requirement needs."""
        _, found = reported(capsys, f"{api}/charges", *ALICE)

        missing = {
            each["id"]: each["reason"] for each in found.values() if each["result"] != "passed"
        }
        uncounted = "the effects are not counted (--count)"
        no_other = "no other body (--other-body)"
        no_caller = "no other caller (--other-header)"
        unknown = "it is not known that a key is required (--required)"
        invalid = "no invalid body (--invalid-body)"
        assert missing == {
            "IDEM-002": uncounted,
            "IDEM-008": "no command that restarts the API (--restart)",
            "IDEM-010": uncounted,
            "IDEM-015": no_other,
            **dict.fromkeys(("IDEM-020", "IDEM-021", "IDEM-022", "IDEM-023"), no_other),
            "IDEM-024": "no other endpoint (--other-url)",
            **dict.fromkeys(("IDEM-030", "IDEM-032"), no_caller),
            **dict.fromkeys(("IDEM-040", "IDEM-041", "IDEM-042"), unknown),
            "IDEM-050": "the dialect has no greatest length of a key",
            "IDEM-052": uncounted,
            **dict.fromkeys(("IDEM-060", "IDEM-061"), invalid),
            "IDEM-062": "no headers that make it fail (--failing-header)",
            **dict.fromkeys(("IDEM-064", "IDEM-065"), uncounted),
        }

    def test_responses_refute(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a count, different responses prove that there was more than one effect."""
        with serving(dialects()["ietf"], "lock around the look-up") as url:
            _, found = reported(capsys, f"{url}/charges", *ALICE, "--only", "IDEM-010")

        reason = found["IDEM-010"]["reason"]
        assert reason == "8 different successful responses, so as many effects"

    def test_responses_alike(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """If two executions get the same response, only a count tells them apart."""
        anyone = [f"{api}/alike", *ALICE, "--only", "IDEM-007"]

        _, found = reported(capsys, *anyone)
        assert found["IDEM-007"]["reason"].startswith("two executions get the same response")
        _, found = reported(capsys, *anyone, *counting(api))
        assert found["IDEM-007"]["result"] == "passed"

    def test_responses_alike_and_no_second_effect(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The count also tells that a request was not executed on its own."""
        with serving(dialects()["paypal"], "ignores the key") as url:
            arguments = [f"{url}/alike", *ALICE, *counting(url), "--dialect", "paypal"]
            _, found = reported(capsys, *arguments, "--only", "IDEM-007")

        assert found["IDEM-007"]["reason"] == "second was not executed: 2 requests, 1 effects"

    def test_body(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A body that is no JSON object has no members to reorder, and none has no half."""
        text = ["--only", "IDEM-027", "--only", "IDEM-064"]
        _, found = reported(capsys, f"{api}/empty", *ALICE[2:], *text)

        assert found["IDEM-027"]["reason"] == "the body is not a JSON object"
        assert found["IDEM-064"]["reason"] == "the request has no body"

    def test_form(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The members of the body are the fields of a form, for an API that reads only forms."""
        more = ["--other-body", OTHER_BODY, "--invalid-body", '{"amount": ["a", null]}']
        arguments = [f"{api}/forms", "--form", *ALICE, *counting(api), *more]
        code, found = reported(capsys, *arguments)

        assert code == 0, [each["reason"] for each in found.values() if each["reason"]]
        chosen = ("IDEM-001", "IDEM-010", "IDEM-020", "IDEM-027")
        assert {found[each]["result"] for each in chosen} == {"passed"}
        assert {found[each]["reason"] for each in ("IDEM-028", "IDEM-066")} == {
            "a form has no whitespace"
        }

    def test_form_with_a_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A dialect whose key is in the body has it in the form."""
        with serving(dialects()["square"]) as url:
            square = ["--dialect", "square", "--form"]
            code, found = reported(capsys, f"{url}/forms", *square, *ALICE, *RETRY)
        assert (code, found["IDEM-001"]["result"]) == (0, "passed")

    def test_page(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Of a page that the API answers, the text has only the title."""
        assert main([f"{api}/forms", *ALICE]) == 2
        assert capsys.readouterr().err == (
            f"POST {api}/forms answers 500 to the request itself: a page, 'KeyError at /forms "
            "& more'. Correct its body, headers or dialect. If the API takes forms, pass --form.\n"
        )

    def test_method(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """With PUT as the method, PUT is no other one. Where nothing was tested, it ends with 2."""
        arguments = [f"{api}/charges", "--method", "put", *ALICE, "--only", "IDEM-025"]
        code, found = reported(capsys, *arguments)

        assert code == 2
        assert found["IDEM-025"]["reason"] == "the request itself has the method PUT"

    def test_credentials(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Where the caller has no credentials, none can be left out."""
        arguments = [f"{api}/open", "--body", BODY, "--only", "IDEM-031"]
        _, found = reported(capsys, *arguments)

        assert found["IDEM-031"]["reason"] == "the request has no credentials (--header)"


class TestConfiguration:
    def test_file(self, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """All values may be in a file; the command line counts more."""
        config = tmp_path / "api.yaml"
        config.write_text(f"""
            body: {BODY}
            other_body: {OTHER_BODY}
            headers: {{Authorization: "Bearer bob"}}
            count: {{url: "{api}/effects?reference={{unique}}", pointer: /counted/n}}
            dialect:
              key: {{in: header, name: Idempotency-Key, form: bare}}
              statuses: {{mismatch: [422], in_progress: [409]}}
        """)
        chosen = ["--only", "IDEM-020", "--only", "IDEM-021", "--only", "IDEM-010"]
        code, found = reported(capsys, f"{api}/charges", "--config", str(config), *chosen)
        assert (code, {each["result"] for each in found.values()}) == (0, {"passed"})

        arguments = [f"{api}/charges", "--config", str(config)]
        assert main([*arguments, "--header", "authorization: nobody"]) == 2

    def test_form_in_a_file(
        self, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """So may the kind of the body, which the command line does not take back."""
        (tmp_path / "api.yaml").write_text(f"form: true\nbody: {BODY}\n")
        given = ["--config", f"{tmp_path}/api.yaml", *ALICE[2:], *RETRY]

        code, _ = reported(capsys, f"{api}/forms", *given)
        assert code == 0

    def test_body_of_a_file(
        self, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A body may be in a file of its own."""
        (tmp_path / "body.json").write_text(BODY)
        body = ["--body", f"@{tmp_path}/body.json"]

        code, _ = reported(capsys, f"{api}/charges", *body, *ALICE[2:], *RETRY)
        assert code == 0

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["ftp://api.example.com"], "The URL is not one of http or https: 'ftp://api."),
            (["http://alice:secret@127.0.0.1:1/"], "The URL has credentials. Send them in"),
            (["{api}/charges", "--dialect", "klingon"], "There is no dialect 'klingon': ietf, "),
            (["{api}/charges", "--only", "IDEM-000"], "The dialect ietf has no requirement IDEM"),
            (["{api}/charges", "--body", "{"], "--body is neither JSON nor @FILE: "),
            (["{api}/charges", "--body", "@/nowhere"], "--body is neither JSON nor @FILE: "),
            (["{api}/charges", "--header", "Authorization"], "A header is 'Name: value', not"),
            (["{api}/charges", "--header", "A: ${NO_SUCH}"], "The variable NO_SUCH of a header"),
            (["{api}/charges", "--config", "/nowhere"], "--config /nowhere: "),
            (["{api}/charges"], "POST {api}/charges answers 401 to the request itself: "),
            (["{api}/charges", "--dialect", "square"], "The dialect square has its key in the"),
            (["http://127.0.0.1:{closed}/"], "the connection failed: "),
            (
                ["{api}/charges", *ALICE, "--count", "{api}/effects?reference=x", "/counted/n"],
                "2 requests with different keys were successful, and the count grew by 0.",
            ),
            (
                ["{api}/charges", *ALICE, "--count", "{api}/effects?reference=x", "/n"],
                "GET {api}/effects?reference=x: its JSON has nothing at '/n': {{",
            ),
            (
                ["{api}/charges", *ALICE, "--count", "{api}/effects?reference=x", "/counted"],
                "GET {api}/effects?reference=x: the value at '/counted' is not an integer: ",
            ),
            (
                ["{api}/charges", *ALICE, "--restart", "false", "--only", "IDEM-008"],
                "The API was not restarted: Command '['false']' returned non-zero exit status 1.",
            ),
            (
                ["{api}/charges", *ALICE, "--restart", "'", "--only", "IDEM-008"],
                "The API was not restarted: No closing quotation",
            ),
            (
                ["{api}/charges", *ALICE, "--restart", " ", "--only", "IDEM-008"],
                "The API was not restarted: ",
            ),
            (["http://[x/"], "The URL is not valid: 'http://[x/' (Invalid IPv6 URL)."),
            (["http://a:65536/"], "The URL is not valid: 'http://a:65536/' (Port out of range"),
            (["http://a..b/"], "The URL is not valid: 'http://a..b/' ("),
            (["http://a/\x00"], "The URL is not valid: 'http://a/\\x00' ("),
            (["{api}/", "--other-url", "http://["], "The URL of the other endpoint is not valid: "),
            (["{api}/", "--other-url", "http://a@b/"], "The URL of the other endpoint has cred"),
            (["{api}/", "--count", "/effects", ""], "The URL of the count is not one of http or"),
            (["{api}/", "--count", "{api}/", "n"], "A JSON pointer begins with a slash: 'n'."),
            (["{api}/", "--method", "PO ST"], "The method is not one of HTTP: 'PO ST'."),
            (["{api}/", "--timeout", "0"], "The timeout must be more than 0 and at most 86400"),
            (["{api}/", "--timeout", "nan"], "The timeout must be more than 0 and at most 86400"),
            (["{api}/", "--header", "Ä: b"], "'Ä' is not the name of a header."),
            (["{api}/", "--header", "Content-Length: 3"], "sets the header Content-Length itself"),
            (["{api}/", "--slow-header", "te: a"], "sets the header te itself: leave it out."),
            (["{api}/", "--header", "A: ${LINES}"], "The value of the header A has a line break"),
            (["{api}/", "--body", '"\\ud800"'], "The body can't be sent as JSON: "),
            (["{api}/", "--body", "[" * 100_000], "--body is neither JSON nor @FILE: "),
            (["{api}/", "--body", "@{api}"], "--body is neither JSON nor @FILE: "),
        ],
    )  # fmt: skip
    def test_nothing_could_be_tested(
        self,
        api: str,
        arguments: list[str],
        text: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It ends with 2 and one sentence if nothing can be tested."""
        monkeypatch.setenv("LINES", "a\nsecret")
        port = free_port()

        def filled(argument: str) -> str:
            return argument.replace("{api}", api).replace("{closed}", str(port))

        assert main([filled(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert filled(text).replace("{{", "{").replace("}}", "}") in captured.err
        assert "secret" not in captured.err
        assert not captured.out

    def test_stopped_midway(self, api: str, capsys: pytest.CaptureFixture[str]) -> None:
        """If the tests can't run to their end, the report still has what was found before."""
        only = [*RETRY, "--only", "IDEM-008", "--only", "IDEM-010"]
        code = main([f"{api}/charges", *ALICE, "--restart", "false", *only, "--format", "json"])

        captured = capsys.readouterr()
        results = {
            each["id"]: (each["result"], each["reason"])
            for each in json.loads(captured.out)["requirements"]
        }
        stopped = ("not tested", "the tests stopped before")
        assert code == 2
        assert results == {"IDEM-001": ("passed", ""), "IDEM-008": stopped, "IDEM-010": stopped}
        assert "The report is not complete. The API was not restarted: " in captured.err

    @pytest.mark.parametrize(("finished", "printed"), [(0, False), (1, True)])
    def test_interrupted(
        self,
        api: str,
        finished: int,
        printed: bool,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The same goes for Ctrl-C; before the first requirement, there is nothing to report."""
        test, judged = runner.Runner.verdict, []

        def verdict(self: Any, requirement: Any) -> Any:
            if len(judged) == finished:
                raise KeyboardInterrupt
            judged.append(requirement.id)
            return test(self, requirement)

        monkeypatch.setattr(runner.Runner, "verdict", verdict)
        assert main([f"{api}/charges", *ALICE, *RETRY, "--only", "IDEM-030"]) == 2
        captured = capsys.readouterr()
        assert captured.err.endswith("The tests were interrupted.\n")
        assert ("IDEM-001  ok " in captured.out) is printed

    def test_white_space_of_a_variable(
        self, api: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """White space around a header's value, such as the end of a line, is not sent."""
        monkeypatch.setenv("TOKEN", "alice\n")
        code, _ = reported(capsys, f"{api}/charges", *ALICE, *RETRY)
        assert code == 0

    def test_unknown_values(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A file with a value that does not exist is refused, and so is one that is no mapping."""
        config = tmp_path / "api.yaml"
        for content, text in (
            ("bodi: {}", "unknown: bodi. It may have body, "),
            ("- body", "it is not a YAML mapping."),
            ("count: http://127.0.0.1:1/", "count has a url and a pointer, both texts."),
            ("count: {pointer: /n}", "count has a url and a pointer, both texts."),
            ("count: {url: 5}", "count has a url and a pointer, both texts."),
            ("{", "while parsing"),
            ("body: 2026-02-30", "day is out of range for month"),
            ("a: \udcff", "can't decode byte 0xff"),
            ("{1: a, bodi: b}", "unknown: 1, bodi. It may have body, "),
            ("headers: [a]", "headers is a mapping, not ['a']."),
            ("other_headers: a", "other_headers is a mapping, not 'a'."),
            ("timeout: many", "timeout is a number of seconds, not 'many'."),
            ("other_url: 5", "other_url is a text, not 5."),
            ("form: maybe", "form is true or false, not 'maybe'."),
            ("body: {on: 2026-11-23}", "The body can't be sent as JSON: Object of type date "),
            ("dialect: [ietf]", "dialect is a name or a mapping, not ['ietf']."),
            ("dialect: {key: {in: path, name: id}}", "needs 'in' (header, body)"),
            ("dialect: {key: {in: header, name: A B}}", "'A B' is not the name of a header."),
        ):
            config.write_bytes(content.encode(errors="surrogateescape"))
            assert main(["http://127.0.0.1:1/", "--config", str(config)]) == 2
            assert text in capsys.readouterr().err

    def test_empty_values(
        self, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A value that a file leaves empty is the default."""
        names = "method headers other_headers count timeout dialect other_url restart".split()
        (tmp_path / "api.yaml").write_text("".join(f"{name}:\n" for name in names))
        given = ["--config", f"{tmp_path}/api.yaml", *ALICE]

        code, _ = reported(capsys, f"{api}/charges", *given, *RETRY)
        assert code == 0

    def test_without_django(self) -> None:
        """It imports neither Django nor anything else of this package that needs it."""
        code = (
            "import sys, runpy; sys.argv = ['conformance', 'ftp://'];"
            "runpy.run_module('idempotency_django.conformance', run_name='__main__')"
        )
        check = (
            f"import atexit, sys; atexit.register(lambda: print('django' in sys.modules)); {code}"
        )
        ended = subprocess.run(
            [sys.executable, "-c", check], check=False, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr

    def test_without_the_extra(self) -> None:
        """Without the extra, it says how to install it."""
        code = "import sys; sys.modules['yaml'] = None; import idempotency_django.conformance"
        ended = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True
        )
        assert ended.returncode == 1
        assert 'pip install "idempotency-django[conformance]"' in ended.stderr


@pytest.mark.parametrize(
    ("media_type", "body", "reason"),
    [
        ("", b"", "is of no media type, not application/problem+json"),
        ("application/problem+json", b"{", "is not JSON"),
        ("application/problem+json", b"[]", "is not a JSON object"),
        ("application/problem+json", b'{"status": 400}', "has the member status 400"),
        ("application/problem+json", b'{"title": "No"}', "has neither a type nor a Link header"),
        ("application/problem+json", b'{"type": "https://example.com/docs"}', ""),
    ],
)
def test_problem(media_type: str, body: bytes, reason: str) -> None:
    """A problem document has its media type, its status, and a link to documentation."""
    response = runner.Response("POST", 422, httpx.Headers({"Content-Type": media_type}), body)

    found = runner._no_problem(response)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("headers", "cacheable"),
    [
        ({}, False),
        ({"Cache-Control": "max-age=0"}, False),
        ({"Cache-Control": "public, max-age=60, no-store"}, False),
        ({"Cache-Control": "s-maxage=060"}, True),
        ({"Cache-Control": "public"}, True),
        ({"Age": "1"}, True),
    ],
)
def test_cacheable(headers: dict[str, str], cacheable: bool) -> None:
    """Caches may keep a response that says so, or that comes from one."""
    assert bool(runner._cacheable(runner.Response("POST", 201, httpx.Headers(headers), b""))) == (
        cacheable
    )


def test_fields_of_a_form() -> None:
    """A list is a field for each of its items; what is no text is JSON; placeholders stay."""
    body = {"a": ["x&y", None, True], "b": "{unique}", "c": {"d": 1}}
    content, media_type = runner._encoded(body, "usual", form=True)
    assert content == b"a=x%26y&a=null&a=true&b={unique}&c={%22d%22%3A+1}"
    assert media_type == "application/x-www-form-urlencoded"


@pytest.mark.parametrize("body", [["a"], 1, None])
def test_no_form(body: Any) -> None:
    """A body that is no JSON object is no form."""
    sent = runner._encoded(body, "usual", form=True)
    assert sent == runner._encoded(body, "usual", form=False)


def test_no_response(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that accepts connections and never responds ends it with 2."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert main([url, "--body", BODY, "--timeout", "0.1"]) == 2
        assert runner._accepts(server.getsockname())
    assert "no response within 0.1 s" in capsys.readouterr().err
    assert not runner._accepts(("127.0.0.1", free_port()))


def test_a_dialect_that_does_not_say(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a dialect of your own leaves out is not tested."""
    (tmp_path / "api.yaml").write_text("dialect: {key: {in: header, name: Idempotency-Key}}")
    given = [f"{api}/charges", *ALICE, "--config", f"{tmp_path}/api.yaml"]
    _, found = reported(capsys, *given, "--only", "IDEM-013", "--only", "IDEM-043")

    assert {each["reason"] for each in found.values()} == {
        "the dialect does not say the status of in_progress",
        "the dialect does not say the status of malformed",
    }


def test_the_last_byte_waits_for_all() -> None:
    """A concurrent request is held back at its last byte until all are there."""
    events: list[Any] = []

    class Gate(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            events.append("all are there")
            return 0

    for part in runner._held_back(b"abc", Gate(2)):
        events.append(part)  # noqa: PERF402  # the gate adds to it, too

    assert events == [b"ab", "all are there", b"c"]


def test_a_request_that_could_not_be_sent_holds_back_no_other() -> None:
    """If one of them fails, the others go on."""
    gate = threading.Barrier(2)
    gate.abort()

    assert b"".join(runner._held_back(b"abc", gate)) == b"abc"


class TestRestart:
    def test_an_api_that_does_not_come_back(
        self, api: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a restart, the runner waits until the API accepts connections, and says if not."""
        monkeypatch.setattr(runner, "PATIENCE", 0.1)
        monkeypatch.setattr(runner, "_accepts", lambda address: False)
        arguments = [f"{api}/charges", *ALICE, "--only", "IDEM-008", "--restart", "true"]

        assert main(arguments) == 2
        assert "The restarted API accepts no connections at" in capsys.readouterr().err


def entry(*steps: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    text = {"id": "IDEM-001", "level": "MUST", "text": "Text.", "source": "practice"}
    return [{**text, "steps": list(steps), **more}]


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (entry(level="OUGHT"), "IDEM-001: level is one of MAY, MUST, SHOULD, not 'OUGHT'."),
        (entry(dialects=["klingon"]), "IDEM-001: unknown dialects: klingon."),
        (entry(size=1), "IDEM-001: unknown: size."),
        (entry() + entry(), "IDEM-001 is there twice."),
        (entry({"wait": 1}), "IDEM-001, step 1 is not one of send, restart, expect, effects: "),
        (entry({"send": "a", "body": "huge"}), "IDEM-001, step 1: body is one of invalid, large,"),
        (entry({"send": "a", "bodi": "usual"}), "IDEM-001, step 1: unknown: bodi."),
        (entry({"expect": "a"}), "IDEM-001, step 1: no response is called 'a'."),
        (
            entry({"send": "a", "leave": "after-request"}, {"expect": "a"}),
            "IDEM-001, step 2: no response is called 'a'.",
        ),
        (entry({"send": "a"}, {"expect": "a", "status": ["good"]}), "there is no status 'good'."),
        (entry({"send": "a"}, {"expect": "a", "same": ["body"]}), "step 2: 'same' needs 'as'"),
        ([{"id": "IDEM-001", "steps": []}], "IDEM-001: missing: level, source, text."),
    ],
)  # fmt: skip
def test_a_wrong_requirement_is_refused(entries: list[dict[str, Any]], text: str) -> None:
    """The loader says which requirement and which step is wrong, and how."""
    with pytest.raises(CatalogueError, match="IDEM-001") as refused:
        requirements_in(entries, dialects())

    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"key": {"in": "header", "name": "K", "size": 1}}, "its key has no size."),
        ({"statuses": {"gone": [410]}}, "there is no status gone."),
        ({"window": 5}, "unknown: window."),
        ({5: 5}, "unknown: 5."),
        ({"key": "Idempotency-Key"}, "key is not a mapping."),
        ({"key": {"in": "header", "name": 5}}, "its key needs 'in' (header, body) and 'name'."),
        ({"key": {"in": ["header"], "name": "K"}}, "its key needs 'in' (header, body) and 'name'."),
        ({"key": {"in": "header", "name": "K", "max": "64"}}, "max is not a number of characters."),
        ({"statuses": [400]}, "statuses is not a mapping."),
        ({"statuses": {"missing": 400}}, "missing is not a list such as [400]."),
        ({"marker": {"header": "X", "value": True}}, "needs the texts 'header' and 'value'."),
    ],
)
def test_a_wrong_dialect_is_refused(changed: dict[str, Any], text: str) -> None:
    """So it is with a dialect."""
    with pytest.raises(CatalogueError) as refused:
        dialect_of("own", {"key": {"in": "header", "name": "K"}, **changed})

    assert text in str(refused.value)


def test_ids_are_in_order() -> None:
    """A requirement is easy to find by its id."""
    ids = [each.id for each in requirements()]

    assert ids == sorted(ids)
