"""``manage.py idempotency_report``"""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError

from ... import __version__
from ...checks.inventory import Endpoint, endpoints
from ...policy import keys, project_dialect
from ...policy.identity import header_of

REPORTED: Final = {
    "broken": "The endpoint has a policy and cannot be protected.",
    "unprotected": "Nothing protects the endpoint: a retry repeats its effects.",
    "optional": "The endpoint is protected for requests that have a key, and accepts others.",
}
"""The statuses that ``--fail-on`` takes, the worst first."""

_LEVELS: Final = {"broken": "error", "unprotected": "warning", "optional": "note"}
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True)
class Line:
    """An endpoint, as it is reported.

    Attributes:
        route: the route, such as ``/api/charges/{id}/``.
        method: the method; ``"*"``: the view does not declare its methods.
        view: the dotted name of the view.
        status: ``"required"``, ``"optional"`` or ``"derived"``, by how a request gets its key;
            ``"exempt"``, ``"unprotected"``, or ``"broken"``.
        how: what protects it: ``"mixin"``, ``"decorator"``, ``"middleware"``; else empty.
        mode: ``"transactional"``, ``"leased"``, or ``"auto"``; empty if it is not protected.
        lifetime: for how many seconds a retry gets the first response; ``None``: without limit, or
            it is not protected.
        problem: why it is broken, and what to do.
        file: where the view is defined, relative to the working directory; empty: unknown.
        number: of the line there.
    """

    route: str
    method: str
    view: str
    status: str
    how: str = ""
    mode: str = ""
    lifetime: float | None = None
    problem: str = ""
    file: str = ""
    number: int = 1

    @property
    def name(self) -> str:
        """The method and the route, which name the endpoint in a baseline."""
        return f"{self.method} {self.route}"


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
            choices=["table", "json", "sarif"],
            default="table",
            help="A table for people, JSON for programs, or SARIF for code scanning "
            "(default: table).",
        )
        parser.add_argument(
            "--fail-on",
            type=_statuses,
            default=(),
            metavar="STATUS[,STATUS]",
            help=f"End with 1 if an endpoint has one of these statuses: {', '.join(REPORTED)}.",
        )
        parser.add_argument(
            "--baseline",
            type=Path,
            metavar="FILE",
            help="Accept the endpoints listed in this file. --fail-on ignores them.",
        )
        parser.add_argument(
            "--update-baseline",
            action="store_true",
            help="Write the endpoints that --fail-on finds into the baseline file.",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            dest="everything",
            help="Include the views of Django, REST framework and this package.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        fail_on, file = options["fail_on"], options["baseline"]
        if options["update_baseline"] and not (file and fail_on):
            raise CommandError("--update-baseline needs --baseline FILE and --fail-on STATUS.")
        lines, others = _lines(options["everything"])
        failing = [line for line in lines if line.status in fail_on]
        if options["update_baseline"]:
            accepted = {line.name: line.status for line in failing}
            text = json.dumps(dict(sorted(accepted.items())), indent=2)
            file.write_text(f"{text}\n", encoding="utf-8")
        else:
            accepted = _accepted(file) if file else {}
        new = [line for line in failing if accepted.get(line.name) != line.status]
        match options["format"]:
            case "json":
                self.stdout.write(_as_json(lines))
            case "sarif":
                self.stdout.write(_as_sarif(lines, accepted))
            case _:
                self.stdout.write("\n".join([*_table(lines), "", _summary(lines, others)]))
        findings = {line.name for line in lines if line.status in REPORTED}
        if stale := sorted(accepted.keys() - findings):
            self.stderr.write(
                f"Remove from {file}: {', '.join(stale)}. They are protected, or no longer exist."
            )
        if new:
            names = ", ".join(f"{line.name} ({line.status})" for line in new)
            raise CommandError(
                f"{len(new)} of {len(lines)} endpoints need attention: {names}. Protect them, "
                "mark them with @idempotency_exempt, or accept them with --update-baseline."
            )


def _statuses(value: str) -> tuple[str, ...]:
    """The statuses of ``--fail-on``."""
    statuses = tuple(filter(None, (each.strip() for each in value.split(","))))
    if unknown := [each for each in statuses if each not in REPORTED]:
        raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(REPORTED)}")
    return statuses


def _accepted(file: Path) -> dict[str, str]:
    """The endpoints of a baseline, each with its status."""
    try:
        accepted = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(
            f"The baseline {file} does not exist. Write it with --update-baseline."
        ) from None
    except (OSError, ValueError) as error:
        raise CommandError(f"The baseline {file} cannot be read: {error}") from error
    if not isinstance(accepted, dict) or not set(accepted.values()) <= REPORTED.keys():
        raise CommandError(
            f"The baseline {file} must be a JSON object such as "
            '{"POST /api/orders/": "unprotected"}.'
        )
    return accepted


def _lines(everything: bool) -> tuple[list[Line], int]:
    """The endpoints, and how many of Django and this package are left out."""
    known = list(endpoints())
    chosen = [_line(each) for each in known if everything or not each.is_built_in]
    return chosen, len(known) - len(chosen)


def _line(endpoint: Endpoint) -> Line:
    file, number = _source(endpoint.defined)
    known: dict[str, Any] = {
        "route": endpoint.route,
        "method": endpoint.method,
        "view": endpoint.view_name,
        "file": file,
        "number": number,
    }
    if endpoint.problem:
        return Line(**known, status="broken", how=endpoint.how, problem=endpoint.problem)
    if endpoint.policy is None:
        return Line(**known, status=endpoint.how or "unprotected")
    policy = endpoint.policy.resolved()
    status = "required" if policy.requires_key(endpoint.method.replace("*", "POST")) else "optional"
    return Line(
        **known,
        status="derived" if policy.key and not keys.reads_header(policy.key) else status,
        how=endpoint.how,
        mode=policy.mode,
        lifetime=policy.ttl.total_seconds() if policy.ttl else None,
    )


def _source(view: Any) -> tuple[str, int]:
    """The file and the line of a view."""
    with suppress(TypeError, OSError, ValueError):
        file = Path(inspect.getsourcefile(view) or "")
        number = inspect.getsourcelines(view)[1]
        return str(
            file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        ), number
    return "", 1


def _table(lines: Sequence[Line]) -> Iterator[str]:
    rows = [("Method", "Route", "Status", "By", "Mode", "View")]
    rows += [
        (each.method, each.route, each.status, each.how, each.mode, each.view) for each in lines
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row, line in zip(rows, [None, *lines], strict=True):
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        if line and line.problem:
            yield f"    {line.problem}"


def _summary(lines: Sequence[Line], others: int) -> str:
    counts = Counter(line.status for line in lines)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    left_out = f" {others} of Django and this package are left out (--all)." if others else ""
    return f"{len(lines)} endpoints: {told or 'none'}.{left_out}"


def _as_json(lines: Sequence[Line]) -> str:
    shown = [{field.name: getattr(line, field.name) for field in fields(line)} for line in lines]
    document = {"header": header_of(project_dialect()), "endpoints": shown}
    return json.dumps(document, indent=2, ensure_ascii=False)


def _as_sarif(lines: Sequence[Line], accepted: dict[str, str]) -> str:
    """SARIF 2.1.0, for GitHub code scanning and others."""
    rules = [
        {
            "id": f"idempotency/{status}",
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": _LEVELS[status]},
        }
        for status, text in REPORTED.items()
    ]
    results = []
    for line in lines:
        if line.status not in REPORTED:
            continue
        location = {"artifactLocation": {"uri": Path(line.file).as_posix()}}
        result: dict[str, Any] = {
            "ruleId": f"idempotency/{line.status}",
            "level": _LEVELS[line.status],
            "message": {"text": f"{line.name}: {line.problem or REPORTED[line.status]}"},
            "partialFingerprints": {"endpoint/v1": line.name},
        }
        if line.file:
            region = {"startLine": line.number}
            result["locations"] = [{"physicalLocation": {**location, "region": region}}]
        if accepted.get(line.name) == line.status:
            result["suppressions"] = [{"kind": "external", "justification": "In the baseline."}]
        results.append(result)
    driver = {
        "name": "idempotency_django",
        "version": __version__,
        "informationUri": "https://idempotency-django.readthedocs.io/",
        "rules": rules,
    }
    runs = [{"tool": {"driver": driver}, "results": results}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}, indent=2)
