"""``python -m idempotency_django.conformance URL``: see ``--help``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import yaml

from .catalogue import CatalogueError, dialect_of, dialects, requirements
from .report import FORMATS
from .runner import Count, Runner, Target, TargetError

ABOUT: Final = """\
Test an HTTP API with idempotency keys from the outside: retries, races, other callers, broken keys.

The API may run on any server. WARNING: the tests create data. They send the request several
hundred times, and it has its effect in most cases. Use an endpoint of a test system.
"""
ENDING: Final = """\
A header's value may name variables of the environment, so that no secret is in the command line:
--header 'Authorization: Bearer ${TOKEN}' (in single quotes). '{unique}' in a body, a URL or a
header becomes a new text in each test.

Exit code: 0 if no tested requirement failed; 1 if one did; 2 if nothing could be tested.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the API that the arguments name, and print the report; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        given = _settings(options)
        known = dialects()
        spoken = given.pop("dialect", "ietf")
        if isinstance(spoken, str) and spoken not in known:
            raise TargetError(f"There is no dialect {spoken!r}: {', '.join(known)}.")
        dialect = known[spoken] if isinstance(spoken, str) else dialect_of("own", spoken)
        target = _target(options.url, given)
        chosen = [each for each in requirements() if each.applies_to(dialect)]
        if unknown := set(options.only) - {each.id for each in chosen}:
            names = ", ".join(sorted(unknown))
            raise TargetError(f"The dialect {dialect.name} has no requirement {names}.")
        chosen = [each for each in chosen if not options.only or each.id in options.only]
        runner = Runner(target, dialect)
        verdicts = [runner.verdict(requirement) for requirement in chosen]
    except (TargetError, CatalogueError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(FORMATS[options.format](target, dialect, verdicts))
    if all(each.result == "not tested" for each in verdicts):
        return 2
    counts = {"MUST"} if options.fail_on == "must" else {"MUST", "SHOULD"}
    failed = [each for each in verdicts if each.result == "failed"]
    return int(any(each.requirement.level in counts for each in failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m idempotency_django.conformance",
        description=ABOUT,
        epilog=ENDING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the endpoint, such as https://api.example.com/charges")
    add("--config", metavar="FILE", help="YAML with the values below, and with other_headers …")
    add("--dialect", metavar="NAME", help=f"how keys are spelled: {', '.join(dialects())}")
    add("--method", metavar="METHOD", help="POST if left out")
    add("--body", metavar="JSON", help="the body of the request, or @FILE")
    add("--other-body", metavar="JSON", help="another valid body, which asks for something else")
    add("--invalid-body", metavar="JSON", help="a body that the API refuses with 4xx")
    add("--form", action="store_true", default=None, help="send the bodies' members as a form")
    for name, text in (
        ("--header", "a header; may be repeated"),
        ("--other-header", "the header of another caller instead"),
        ("--failing-header", "a header that makes the API fail with 5xx"),
        ("--slow-header", "a header that makes the API work longer, for races"),
    ):
        add(name, action="append", default=[], metavar="'NAME: VALUE'", help=text)
    add("--other-url", metavar="URL", help="another endpoint that takes keys")
    add(
        "--count", nargs=2, metavar=("URL", "POINTER"), help="where GET tells the number of effects"
    )
    add("--required", action="store_true", default=None, help="the API requires a key here")
    add("--restart", metavar="COMMAND", help="a command that restarts the API")
    add("--timeout", type=float, metavar="SECONDS", help="for each response; 30 if left out")
    add("--only", action="append", default=[], metavar="ID", help="only this; may be repeated")
    add("--format", choices=FORMATS, default="text")
    add(
        "--fail-on", choices=["must", "should"], default="should", help="the least level to fail on"
    )
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the file and the command line say; the command line counts more."""
    given: dict[str, Any] = {}
    if options.config:
        try:
            given = yaml.safe_load(Path(options.config).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            _refuse(f"--config {options.config}: {error}", error)
        if not isinstance(given, dict):
            raise TargetError(f"--config {options.config}: it is not a YAML mapping.")
        if count := given.get("count"):
            if not isinstance(count, dict) or not count.keys() <= {"url", "pointer"}:
                raise TargetError(f"--config {options.config}: count has a url and a pointer.")
            given["count"] = (count.get("url", ""), count.get("pointer", ""))
    known = {each.name for each in fields(Target)} - {"url"} | {"dialect"}
    if unknown := set(given) - known:
        raise TargetError(
            f"--config {options.config}: unknown: {', '.join(sorted(unknown))}. "
            f"It may have {', '.join(sorted(known))}."
        )
    for name in (
        "dialect",
        "method",
        "other_url",
        "count",
        "required",
        "restart",
        "timeout",
        "form",
    ):
        if (value := getattr(options, name)) is not None:
            given[name] = value
    for name in ("body", "other_body", "invalid_body"):
        if (value := getattr(options, name)) is not None:
            given[name] = _json(f"--{name.replace('_', '-')}", value)
    for name in ("header", "other_header", "failing_header", "slow_header"):
        lines = dict(_header(line) for line in getattr(options, name))
        given[f"{name}s"] = {**(given.get(f"{name}s") or {}), **lines}
    return given


def _target(url: str, given: Mapping[str, Any]) -> Target:
    if not re.match(r"https?://[^/]", url):
        raise TargetError(f"The URL is not one of http or https: {url!r}.")
    if "@" in urlsplit(url).netloc:
        raise TargetError("The URL has credentials. Send them in a header (--header).")
    values = dict(given)
    for name in ("headers", "other_headers", "failing_headers", "slow_headers"):
        values[name] = {each: _filled(str(value)) for each, value in values[name].items()}
    if count := values.pop("count", None):
        values["count"] = Count(*count)
    values["method"] = str(values.get("method", "POST")).upper()
    return Target(url, **values)


def _json(option: str, value: str) -> Any:
    """JSON, or the JSON in a file after an @."""
    try:
        return json.loads(Path(value[1:]).read_text() if value.startswith("@") else value)
    except (OSError, ValueError) as error:
        _refuse(f"{option} is neither JSON nor @FILE: {error}", error)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise TargetError(f"A header is 'Name: value', not {line!r}.")
    return name.strip(), value.strip()


def _filled(value: str) -> str:
    """The text with variables of the environment instead of ``${NAME}``."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise TargetError(f"The variable {match[1]} of a header is not in the environment.")
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", variable, value)


def _refuse(text: str, error: Exception) -> NoReturn:
    raise TargetError(text) from error


if __name__ == "__main__":
    sys.exit(main())
