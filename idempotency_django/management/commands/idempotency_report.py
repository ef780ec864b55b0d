"""``manage.py idempotency_report``"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.urls import get_resolver

from ...checks.inventory import Endpoint, endpoints
from ...conf import conf
from ...policy import keys

REPORTED: Final = {
    "broken": "The endpoint has a policy and cannot be protected.",
    "unprotected": "Nothing protects the endpoint: a retry repeats its effects.",
    "optional": "The endpoint is protected for requests that have a key, and accepts others.",
}
"""The statuses that ``--fail-on`` takes, the worst first."""


@dataclass(frozen=True, slots=True)
class Line:
    """An endpoint, as it is reported.

    Attributes:
        route: the route, such as ``/api/charges/{id}/``.
        method: the method; ``"*"``: the view does not declare its methods.
        view: the dotted name of the view.
        status: ``"required"``, ``"optional"`` or ``"derived"``, by how a request gets its key;
            ``"exempt"``, ``"unprotected"``, or ``"broken"``.
        how: what protects it: ``"mixin"``, ``"decorator"``, ``"middleware"``, or ``"inbox"``, which
            handles each webhook once; else empty.
        mode: ``"transactional"``, ``"leased"`` or ``"auto"``; empty if it is not protected.
        lifetime: for how many seconds a retry gets the first response; ``None``: without limit, or
            it is not protected.
        problem: why it is broken, and what to do.
        urlconf: the URLconf that it was asked for with; empty: the project's ``ROOT_URLCONF``.
    """

    route: str
    method: str
    view: str
    status: str
    how: str = ""
    mode: str = ""
    lifetime: float | None = None
    problem: str = ""
    urlconf: str = ""

    @property
    def endpoint(self) -> str:
        """The method and the route."""
        return f"{self.method} {self.route}"

    @property
    def name(self) -> str:
        """The endpoint, and the URLconf that it was asked for with."""
        return f"{self.endpoint} in {self.urlconf}" if self.urlconf else self.endpoint


class Command(BaseCommand):
    """Reports which endpoints are protected, and how; for people and for CI."""

    help = (
        "Lists each endpoint that can change something, and whether a retry of it is safe. "
        "--fail-on makes CI fail for a new endpoint without protection."
    )

    requires_system_checks = ()  # a view that one of them refuses is reported as broken

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format",
            choices=["table", "json"],
            default="table",
            help="A table for people, or JSON for programs (default: table).",
        )
        parser.add_argument(
            "--fail-on",
            type=_statuses,
            default=(),
            metavar="STATUS[,STATUS]",
            help=f"End with 1 if an endpoint has one of these statuses: {', '.join(REPORTED)}.",
        )
        parser.add_argument(
            "--urlconf",
            action="append",
            default=[],
            metavar="MODULE",
            help="Report this URLconf instead of ROOT_URLCONF, such as shop.hosts.api; may be "
            "repeated.",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            dest="everything",
            help="Include the views of Django, REST framework and this package.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        fail_on = options["fail_on"]
        lines, others = _lines(options["everything"], options["urlconf"])
        match options["format"]:
            case "json":
                self.stdout.write(_as_json(lines))
            case _:
                text = [*_table(lines), "", _summary(lines, others)]
                self.stdout.write("\n".join(text))
        if fail_on and not lines:
            raise CommandError(
                "There is no endpoint that can change something, so --fail-on checks nothing. Is "
                "this the right URLconf (--urlconf)? If so, add --fail-on with the first endpoint."
            )
        if found := [line for line in lines if line.status in fail_on]:
            names = ", ".join(f"{line.name} ({line.status})" for line in found)
            raise CommandError(
                f"{len(found)} of {_counted(len(lines), 'endpoint')} "
                f"need{'s' if len(found) == 1 else ''} attention: {names}. Protect them, or mark "
                "them with @idempotency_exempt."
            )


def _statuses(value: str) -> tuple[str, ...]:
    """The statuses of ``--fail-on``."""
    statuses = tuple(filter(None, (each.strip() for each in value.split(","))))
    if unknown := [each for each in statuses if each not in REPORTED]:
        raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(REPORTED)}")
    if not statuses:
        raise ArgumentTypeError(f"it needs at least one of {', '.join(REPORTED)}")
    return statuses


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _lines(everything: bool, urlconfs: Sequence[str]) -> tuple[list[Line], int]:
    """The endpoints, and how many of Django and this package are left out."""
    for name in urlconfs:
        try:
            _ = get_resolver(name).url_patterns
        except (ImportError, ImproperlyConfigured, ValueError, TypeError) as error:
            raise CommandError(f"The URLconf {name!r} cannot be loaded: {error}") from error
    names = dict.fromkeys(urlconfs or [""])
    known = [(each, name) for name in names for each in endpoints(name or None)]
    chosen = [_line(each, name) for each, name in known if everything or not each.is_built_in]
    return chosen, len(known) - len(chosen)


def _line(endpoint: Endpoint, urlconf: str) -> Line:
    known: dict[str, Any] = {
        "urlconf": urlconf,
        "route": endpoint.route,
        "method": endpoint.method,
        "view": endpoint.view_name,
    }
    if endpoint.problem:
        return Line(**known, status="broken", how=endpoint.how, problem=endpoint.problem)
    if endpoint.how == "inbox":
        return Line(**known, status="derived", how=endpoint.how)
    if endpoint.policy is None:
        return Line(**known, status=endpoint.how or "unprotected")
    policy = endpoint.policy.resolved()
    status = "required" if policy.requires_key(endpoint.method.replace("*", "POST")) else "optional"
    return Line(
        **known,
        status="derived" if not keys.reads_header(policy.key) else status,
        how=endpoint.how,
        mode=policy.mode,
        lifetime=policy.ttl.total_seconds() if policy.ttl else None,
    )


def _table(lines: Sequence[Line]) -> Iterator[str]:
    rows = [["Method", "Route", "Status", "By", "Mode", "View", "URLconf"]]
    rows += [
        [each.method, each.route, each.status, each.how, each.mode, each.view, each.urlconf]
        for each in lines
    ]
    if not any(each.urlconf for each in lines):
        rows = [row[:-1] for row in rows]
    for text, line in zip(_aligned(rows), [None, *lines], strict=True):
        yield text
        if line and line.problem:
            yield f"    {line.problem}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()


def _summary(lines: Sequence[Line], others: int) -> str:
    counts = Counter(line.status for line in lines)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    left_out = f" {others} of Django and this package are left out (--all)." if others else ""
    return f"{_counted(len(lines), 'endpoint')}: {told or 'none'}.{left_out}"


def _as_json(lines: Sequence[Line]) -> str:
    shown = [{field.name: getattr(line, field.name) for field in fields(line)} for line in lines]
    report = {"header": conf.header, "endpoints": shown}
    return json.dumps(report, indent=2, ensure_ascii=False)
