"""``manage.py idempotency_report``"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError

from ...checks.inventory import Endpoint, endpoints
from ...conf import conf
from ...policy import keys

REPORTED: Final = ("broken", "unprotected", "optional")
"""The statuses that ``--fail-on`` takes, the worst first: each includes those before it."""

_COLUMNS: Final = {
    "Method": "method",
    "Route": "route",
    "Status": "status",
    "By": "how",
    "Mode": "mode",
    "View": "view",
}


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
            choices=REPORTED,
            help="End with 1 if an endpoint has this status, or a worse one.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        lines, others = _lines()
        if options["format"] == "json":
            shown = {"header": conf.header, "endpoints": lines}
            self.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False))
        else:
            self.stdout.write("\n".join([*_table(lines), "", _summary(lines, others)]))
        if options["fail_on"] and not lines:
            raise CommandError(
                "There is no endpoint that can change something, so --fail-on checks nothing. Is "
                "ROOT_URLCONF the right one? If so, add --fail-on with the first endpoint."
            )
        bad = REPORTED[: REPORTED.index(options["fail_on"]) + 1] if options["fail_on"] else ()
        if found := [line for line in lines if line["status"] in bad]:
            raise CommandError(
                f"{len(found)} of {_counted(len(lines), 'endpoint')} "
                f"need{'s' if len(found) == 1 else ''} attention: {', '.join(map(_name, found))}. "
                "Protect them, or mark them with @idempotency_exempt."
            )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _name(line: dict[str, Any]) -> str:
    """The endpoint and its status."""
    return f"{line['method']} {line['route']} ({line['status']})"


def _lines() -> tuple[list[dict[str, Any]], int]:
    """The endpoints, and how many of Django and this package are left out."""
    known = list(endpoints())
    chosen = [_line(each) for each in known if not each.is_built_in]
    return chosen, len(known) - len(chosen)


def _line(endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint, as it is reported; its ``lifetime`` is that of a response, in seconds."""
    policy = endpoint.policy.resolved() if endpoint.policy and not endpoint.problem else None
    return {
        "route": endpoint.route,
        "method": endpoint.method,
        "view": endpoint.view_name,
        "status": _status(endpoint),
        "how": endpoint.how,
        "mode": policy.mode if policy else "",
        "lifetime": policy.ttl.total_seconds() if policy and policy.ttl else None,
        "problem": endpoint.problem,
    }


def _status(endpoint: Endpoint) -> str:
    """Whether a retry is safe, and by how a request gets its key."""
    if endpoint.problem:
        return "broken"
    if endpoint.how == "inbox":  # which handles each webhook once
        return "derived"
    if endpoint.policy is None:
        return endpoint.how or "unprotected"
    policy = endpoint.policy.resolved()
    if not keys.reads_header(policy.key):
        return "derived"
    requires_key = policy.requires_key(endpoint.method.replace("*", "POST"))
    return "required" if requires_key else "optional"


def _table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [[*_COLUMNS], *([line[name] for name in _COLUMNS.values()] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, line in zip(rows, [None, *lines], strict=True):
        cells = zip(row, widths, strict=True)
        yield "  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()
        if line and line["problem"]:
            yield f"    {line['problem']}"


def _summary(lines: Sequence[dict[str, Any]], others: int) -> str:
    counts = Counter(line["status"] for line in lines)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    left_out = f" {others} of Django and this package are left out." if others else ""
    return f"{_counted(len(lines), 'endpoint')}: {told or 'none'}.{left_out}"
