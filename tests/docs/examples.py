"""How the examples of the documentation are run, by the language of their block.

==============  ==================================================================================
``python``      a file of the example project, if it begins with a comment with its path (see
                ``files.py``); settings take effect, and so do the ``urlpatterns`` of the project.
                A session of ``manage.py shell``, if it begins with ``>>>``
``http``        a request is sent and its response kept; a response is compared with what was kept
``console``     each ``$`` command runs, and its output is compared with lines below it, if any
==============  ==================================================================================

A page is one story: its examples share the database. Its files are modules, which import what they
use. What a reader need not see is in a comment, ``% invisible-code-block: python``: it sees the
names of all files, as sessions do. An invisible block may be a file, too. ``...`` in an output
stands for anything.
"""

from __future__ import annotations

import argparse
import doctest
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test.client import ClientHandler
from django.urls import clear_url_caches
from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser

from tests.docs.files import ROOT, Files, models_of_the_shell, path_of

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = frozenset({"python", "http", "console"})
COMPARED = frozenset({"sql"})  # by test_statements.py


def difference(expected: str, actual: str) -> str | None:
    """What tells an output from the documented one; ``None``: nothing does."""
    checker, example = doctest.OutputChecker(), doctest.Example("", expected.strip())
    actual = actual.strip() + "\n"
    if checker.check_output(example.want, actual, FLAGS):
        return None
    return checker.output_difference(example, actual, FLAGS)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """The commands of a ``console`` block, each with the output below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        last = next(n for n, line in enumerate(lines) if not line.endswith("\\\n"))
        yield "".join(lines[: last + 1]).strip(), "".join(lines[last + 1 :])


class Urls:
    """A ``ROOT_URLCONF`` that is a page's own ``urlpatterns``."""

    def __init__(self, urlpatterns: list[Any]) -> None:
        self.urlpatterns = urlpatterns


class Page:
    """One document, and what its examples have done so far."""

    def __init__(self, path: Path, settings: Any, client: Any, broker: Callable[[], str]) -> None:
        self.settings = settings
        self.broker = broker
        self.client = client
        self.response: Any = None
        parsers = [
            CodeBlockParser("python", self.python),
            CodeBlockParser("http", self.http),
            CodeBlockParser("console", self.console),
        ]
        self.document: Document = Sybil(parsers).parse(path)
        self.document.namespace |= models_of_the_shell()
        self.document.namespace |= {"__name__": "shop.views", "client": client, "page": self}
        self.files = Files(settings)

    def run(self) -> None:
        """Run the examples in their order; the project that they make passes Django's checks."""
        with self.files:
            for example in self.document:
                example.evaluate()
            call_command("check")

    def start_over(self) -> None:
        """Empty the database, for the next part of a page that tells more than one story."""
        call_command("flush", verbosity=0, interactive=False)
        self.client.handler = ClientHandler(enforce_csrf_checks=False)  # with other middleware
        self.client.force_login(User.objects.create_user("alice", password="alice"))

    def python(self, example: Example) -> str | None:
        """Run Python, and put to use what it defined."""
        if example.parsed.startswith(">>>"):
            return self._doctest(example)
        names = example.namespace
        if path_of(example.parsed):
            names |= self.files.run(example.parsed)
            names.pop("urlpatterns", None)
            return None
        PythonEvaluator()(example)
        if "urlpatterns" in names:  # of an invisible block
            self.settings.ROOT_URLCONF = Urls(names.pop("urlpatterns"))
            clear_url_caches()
        return None

    def _doctest(self, example: Example) -> str:
        test = doctest.DocTestParser().get_doctest(
            example.parsed, {}, example.path, example.path, example.line
        )
        test.globs = example.namespace
        failures: list[str] = []
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=failures.append, clear_globs=False)
        return "".join(failures)

    def http(self, example: Example) -> str | None:
        """Send a request, or compare a response with the one to the last request."""
        head, _, body = example.parsed.partition("\n\n")
        first, *lines = head.splitlines()
        headers = dict(line.split(": ", 1) for line in lines)
        if first.startswith("HTTP/"):
            return self._compare(int(first.split()[1]), headers, body)
        method, path, _version = first.split()
        self.response = self.client.generic(
            method,
            path,
            body.strip(),
            content_type=headers.pop("Content-Type", "application/octet-stream"),
            headers=headers,
        )
        self.document.namespace["response"] = self.response
        return None

    def _compare(self, status: int, headers: dict[str, str], body: str) -> str | None:
        response = self.response
        found = {name: response.headers.get(name) for name in headers}
        if (response.status_code, found) != (status, headers):
            return f"{response.status_code} {response.headers}\n{response.content!r}"
        if "json" in response.headers.get("Content-Type", ""):
            documented, actual = json.loads(body), response.json()
            return None if documented == actual else f"The result was {actual}."
        return difference(body, response.getvalue().decode())

    def console(self, example: Example) -> str | None:
        """Run the commands of a reader who sits in the project's folder."""
        failures = []
        for command, output in commands(example.parsed):
            program, *arguments = _without_variables(shlex.split(command.replace("\\\n", " ")))
            if program == "make":
                _check_targets(arguments)
            elif program == "pip":
                _check_requirement(arguments[-1])
            elif program == "curl":
                failures.append(difference(output, self._curl(arguments)))
            elif arguments[:2] == ["-m", "pytest"]:
                assert (ROOT / arguments[-1]).is_dir(), command
            else:
                assert [program, arguments[0]] == ["python", "manage.py"], command
                if arguments[1] == "runserver":
                    continue  # in test_project.py
                written = io.StringIO()
                try:
                    call_command(*arguments[1:], stdout=written)
                except CommandError as error:  # a terminal shows it after the output
                    if not output.strip():
                        raise
                    written.write(f"CommandError: {error}")
                if output.strip():
                    failures.append(difference(output, written.getvalue()))
        return "".join(filter(None, failures))

    def _curl(self, arguments: list[str]) -> str:
        """What curl would print of the response."""
        parser = argparse.ArgumentParser(prog="curl")
        parser.add_argument("url")
        parser.add_argument("-X", dest="method")
        parser.add_argument("-H", dest="headers", action="append", default=[])
        parser.add_argument("-d", dest="body", default="")
        parser.add_argument("-i", dest="with_head", action="store_true")
        parser.add_argument("-s", dest="silent", action="store_true")
        given = parser.parse_args(arguments)
        headers = dict(line.split(": ", 1) for line in given.headers)
        self.response = self.client.generic(
            given.method or ("POST" if given.body else "GET"),
            urlsplit(given.url)._replace(scheme="", netloc="").geturl(),
            given.body,
            content_type=headers.pop("Content-Type", "application/x-www-form-urlencoded"),
            headers=headers,
        )
        self.document.namespace["response"] = self.response
        first = f"HTTP/1.1 {self.response.status_code} {self.response.reason_phrase}"
        body = self.response.getvalue().decode()
        lines = [first, *(f"{name}: {value}" for name, value in self.response.items())]
        lines += [f"Content-Length: {len(body)}", "", body]  # which servers add
        return "\n".join(lines) if given.with_head else body


def _without_variables(words: list[str]) -> list[str]:
    """The command behind the variables that are set for it, which must be variables of ours."""
    known = "".join(
        (ROOT / "tests" / name).read_text() for name in ("provision.py", "support/servers.py")
    )
    while re.match(r"[A-Z_]+=", words[0]):
        name = words.pop(0).partition("=")[0]
        assert name in known, f"There is no variable {name}."
    return words


def _check_targets(targets: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"There is no `make {target}`."


def _check_requirement(requirement: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    assert name in (project["name"], ".")
    assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"])
