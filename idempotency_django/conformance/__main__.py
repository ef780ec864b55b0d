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

import yaml

from .catalogue import CatalogueError, Requirement, dialect_of, dialects, requirements
from .report import FORMATS
from .runner import Count, Runner, Target, TargetError, Verdict, check_url

ABOUT: Final = """\
Test an HTTP API with idempotency keys from the outside: retries, races, other callers, broken keys.

The API may run on any server. WARNING: the tests create data. They send the request several
hundred times, and it has its effect in most cases. Use an endpoint of a test system.
"""
ENDING: Final = """\
A header's value may name variables of the environment, so that no secret is in the command line:
--header 'Authorization: Bearer ${TOKEN}' (in single quotes). '{unique}' in a body, a URL or a
header becomes a new text in each test.

Exit code: 0 if no tested requirement failed; 1 if one did; 2 if nothing could be tested, or the
tests did not run to their end.
"""
LONGEST: Final = 86_400.0
"""Seconds of the longest timeout."""

_INTERRUPTED: Final = "The tests were interrupted."
_TEXT, _SWITCH, _HEADERS = (str, "a text"), (bool, "true or false"), (dict, "a mapping")
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(("method", "other_url", "restart"), _TEXT),
    **dict.fromkeys(("form", "required"), _SWITCH),
    **dict.fromkeys(("headers", "other_headers", "failing_headers", "slow_headers"), _HEADERS),
    "timeout": ((int, float), "a number of seconds"),
    "dialect": ((str, dict), "a name or a mapping"),
}
"""What the values in a file may be, apart from the bodies."""
_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
"""The name of a header or a method (RFC 9110)."""
_FRAMING: Final = frozenset(
    "connection content-length expect keep-alive te trailer transfer-encoding upgrade".split()
)
"""Headers of a connection or of a message's form, which only the runner's HTTP client can know."""
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")


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
        if dialect.key["in"] == "header":
            _check_name(dialect.key["name"])
        target = _target(options.url, given)
        chosen = [each for each in requirements() if each.applies_to(dialect)]
        if unknown := set(options.only) - {each.id for each in chosen}:
            names = ", ".join(sorted(unknown))
            raise TargetError(f"The dialect {dialect.name} has no requirement {names}.")
        chosen = [each for each in chosen if not options.only or each.id in options.only]
        runner = Runner(target, dialect)
        verdicts, stopped = _verdicts(runner, chosen)
    except (TargetError, CatalogueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        return 2
    sys.stdout.write(FORMATS[options.format](target, dialect, verdicts))
    if stopped:
        print(f"The report is not complete. {stopped}", file=sys.stderr)
    if stopped or all(each.result == "not tested" for each in verdicts):
        return 2
    counts = {"MUST"} if options.fail_on == "must" else {"MUST", "SHOULD"}
    failed = [each for each in verdicts if each.result == "failed"]
    return int(any(each.requirement.level in counts for each in failed))


def _verdicts(runner: Runner, chosen: Sequence[Requirement]) -> tuple[list[Verdict], str]:
    """The verdicts on all requirements, and why the tests stopped early; empty: they did not.

    Raises:
        TargetError: they stopped before the first verdict.
    """
    verdicts: list[Verdict] = []
    try:
        for number, requirement in enumerate(chosen, 1):
            if sys.stderr.isatty():  # a person waits
                print(f"{number} of {len(chosen)}: {requirement.id} …", file=sys.stderr)
            verdicts.append(runner.verdict(requirement))  # kept after an error
    except (TargetError, KeyboardInterrupt) as error:
        if not verdicts:
            raise
        left = chosen[len(verdicts) :]
        verdicts += [Verdict(each, "not tested", "the tests stopped before") for each in left]
        return verdicts, str(error) or _INTERRUPTED
    return verdicts, ""


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
    given = _from_file(options.config) if options.config else {}
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
        given[f"{name}s"] = {**given.get(f"{name}s", {}), **lines}
    return given


def _from_file(file: str) -> dict[str, Any]:
    """The values in a YAML file."""
    try:
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        _refuse(f"--config {file}: {error}", error)
    if not isinstance(given, dict):
        raise TargetError(f"--config {file}: it is not a YAML mapping.")
    given = {name: value for name, value in given.items() if value is not None}
    known = {each.name for each in fields(Target)} - {"url"} | {"dialect"}
    if unknown := given.keys() - known:
        raise TargetError(
            f"--config {file}: unknown: {', '.join(sorted(map(str, unknown)))}. "
            f"It may have {', '.join(sorted(known))}."
        )
    for name, value in given.items():
        kind, text = _KINDS.get(name, (object, ""))
        if not isinstance(value, kind):
            raise TargetError(f"--config {file}: {name} is {text}, not {value!r}.")
    if (count := given.get("count")) is not None:
        texts = isinstance(count, dict) and all(isinstance(each, str) for each in count.values())
        if not texts or not {"url"} <= count.keys() <= {"url", "pointer"}:
            raise TargetError(f"--config {file}: count has a url and a pointer, both texts.")
        given["count"] = (count["url"], count.get("pointer", ""))
    return given


def _target(url: str, given: Mapping[str, Any]) -> Target:
    values = dict(given)
    check_url("The URL", url)
    if other := values.get("other_url"):
        check_url("The URL of the other endpoint", other)
    for name in ("headers", "other_headers", "failing_headers", "slow_headers"):
        values[name] = dict(_sent(str(each), value) for each, value in values[name].items())
    for name in ("body", "other_body", "invalid_body"):
        try:
            json.dumps(values.get(name), ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            _refuse(f"The {name.replace('_', ' ')} can't be sent as JSON: {error}", error)
    if count := values.pop("count", None):
        values["count"] = Count(*count)
        check_url("The URL of the count", values["count"].url)
        if not re.match("/|$", values["count"].pointer):
            raise TargetError(f"A JSON pointer begins with a slash: {values['count'].pointer!r}.")
    if not 0 < (timeout := values.get("timeout", 1)) <= LONGEST:
        raise TargetError(
            f"The timeout must be more than 0 and at most {LONGEST:g} seconds, not {timeout:g}."
        )
    values["method"] = values.get("method", "POST").upper()
    if not _NAME.fullmatch(values["method"]):
        raise TargetError(f"The method is not one of HTTP: {values['method']!r}.")
    return Target(url, **values)


def _sent(name: str, value: Any) -> tuple[str, str]:
    """A header as it is sent; its value is in no error, since it may be a secret."""
    filled = _filled(str(value)).strip()
    _check_name(name)
    if _CONTROLS.search(filled):
        raise TargetError(
            f"The value of the header {name} has a line break or a control character."
        )
    return name, filled


def _check_name(header: str) -> None:
    if not _NAME.fullmatch(header):
        raise TargetError(f"{header!r} is not the name of a header.")
    if header.lower() in _FRAMING:
        raise TargetError(
            f"The runner's HTTP client sets the header {header} itself: leave it out."
        )


def _json(option: str, value: str) -> Any:
    """JSON, or the JSON in a file after an @."""
    try:
        text = Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
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
