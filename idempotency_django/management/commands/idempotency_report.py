"""``manage.py idempotency_report``"""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, router
from django.urls import get_resolver

from ... import __version__
from ...checks.inventory import Endpoint, endpoints
from ...conf import conf
from ...engine.effects import DID
from ...http import shadow
from ...models import IdempotencyObservation
from ...policy import keys, project_dialect
from ...policy.identity import header_of
from ...stores import stores

REPORTED: Final = {
    "broken": "The endpoint has a policy and cannot be protected.",
    "unprotected": "Nothing protects the endpoint: a retry repeats its effects.",
    "observed": "The endpoint is only observed (mode='observe'): a retry repeats its effects.",
    "optional": "The endpoint is protected for requests that have a key, and accepts others.",
}
"""The statuses that ``--fail-on`` takes, the worst first."""

DUPLICATES: Final = "duplicates"
_DUPLICATES_TEXT: Final = "The endpoint is only observed, and executed duplicates."
_COLUMNS: Final = {
    "replayed": "Executed again",
    "in_progress": "At the same time",
    "mismatched": "Other content",
    "missing": "No key",
    "refused": "Bad key",
}
_LEVELS: Final = {
    "broken": "error",
    "unprotected": "warning",
    "observed": "warning",
    "optional": "note",
    DUPLICATES: "error",
}
_SWITCHED_OFF: Final = (
    "WARNING: IDEMPOTENCY['ENABLED'] is False. Nothing is enforced or observed now; the statuses "
    "are those with True."
)
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True)
class Line:
    """An endpoint, as it is reported.

    Attributes:
        route: the route, such as ``/api/charges/{id}/``.
        method: the method; ``"*"``: the view does not declare its methods.
        view: the dotted name of the view.
        status: ``"required"``, ``"optional"`` or ``"derived"``, by how a request gets its key;
            ``"observed"``, ``"exempt"``, ``"unprotected"``, or ``"broken"``.
        how: what protects it: ``"mixin"``, ``"decorator"``, ``"middleware"``, ``"extension"``, or
            ``"inbox"``, which handles each webhook once; else empty.
        mode: ``"transactional"``, ``"leased"``, ``"auto"`` or ``"observe"``; empty if it is not
            protected.
        lifetime: for how many seconds a retry gets the first response; ``None``: without limit, or
            it is not protected.
        problem: why it is broken, and what to do.
        file: where the view is defined, relative to the working directory; empty: unknown.
        number: of the line there.
        urlconf: the URLconf that it was asked for with; empty: the project's ``ROOT_URLCONF``.
        mutation: the name of the mutation of GraphQL; empty: it is a view.
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
    urlconf: str = ""
    mutation: str = ""

    @property
    def place(self) -> str:
        """The route, and the mutation if it is one, such as ``/graphql/ pay``."""
        return f"{self.route} {self.mutation}".rstrip()

    @property
    def endpoint(self) -> str:
        """The method and the place."""
        return f"{self.method} {self.place}"

    @property
    def name(self) -> str:
        """The name in a baseline. Several endpoints may have it: parameters have no types there."""
        return f"{self.endpoint} in {self.urlconf}" if self.urlconf else self.endpoint

    @property
    def key(self) -> tuple[str, str]:
        """What a baseline counts."""
        return self.name, self.status

    @property
    def found(self) -> bool:
        """Whether it is a finding."""
        return self.status in REPORTED


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
        parser.add_argument(
            "--shadow",
            action="store_true",
            help="Report what was counted at endpoints with mode='observe': which of them executed "
            "duplicates.",
        )
        parser.add_argument(
            "--reset",
            action="store_true",
            help="With --shadow: delete the counts after the report.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["shadow"]:
            self._report_shadow(options)
            return
        if options["reset"]:
            raise CommandError("--reset needs --shadow.")
        fail_on, file = options["fail_on"], options["baseline"]
        if options["update_baseline"] and not (file and fail_on):
            raise CommandError("--update-baseline needs --baseline FILE and --fail-on STATUS.")
        lines, others = _lines(options["everything"], options["urlconf"])
        if options["update_baseline"]:
            accepted = Counter(line.key for line in lines if line.status in fail_on)
            if lines:
                _write_baseline(file, accepted)
        else:
            accepted = _accepted(file) if file else Counter()
        known = _known(lines, accepted)
        match options["format"]:
            case "json":
                self.stdout.write(_as_json(lines))
            case "sarif":
                self.stdout.write(_as_sarif(_results(lines, known), REPORTED))
            case _:
                text = [*_warning(), *_table(lines), "", _summary(lines, others)]
                self.stdout.write("\n".join(text))
        listed = Counter(name for name, _ in accepted.elements())
        if stale := sorted(
            (listed - Counter(each.name for each in lines if each.found)).elements()
        ):
            self.stderr.write(
                f"Remove from {file}: {', '.join(stale)}. They are protected, or no longer exist."
            )
        if fail_on and not lines:
            raise CommandError(
                "There is no endpoint that can change something, so --fail-on checks nothing. Is "
                "this the right URLconf (--urlconf)? If so, add --fail-on with the first endpoint."
            )
        pairs = zip(lines, known, strict=True)
        if new := [line for line, is_known in pairs if line.status in fail_on and not is_known]:
            names = ", ".join(
                f"{line.name} ({line.status}"
                f"{', one more than in the baseline' if line.key in accepted else ''})"
                for line in new
            )
            raise CommandError(
                f"{len(new)} of {_counted(len(lines), 'endpoint')} "
                f"need{'s' if len(new) == 1 else ''} attention: {names}. Protect them, mark them "
                "with @idempotency_exempt, or accept them with --update-baseline."
            )

    def _report_shadow(self, options: dict[str, Any]) -> None:
        if options["fail_on"] or options["baseline"]:
            raise CommandError("--shadow takes neither --fail-on nor --baseline.")
        lines, _ = _lines(options["everything"], options["urlconf"])
        try:
            shadows = _shadows(lines)
        except DatabaseError as error:
            raise CommandError(
                f"Cannot read the counts: {str(error).strip().rstrip('.')}. Check that the "
                "database is running and migrated (manage.py migrate)."
            ) from error
        broken = [line for line in lines if line.status == "broken"]
        match options["format"]:
            case "json":
                shown = {
                    **_head(),
                    "endpoints": [asdict(each) for each in shadows],
                    "not_observed": [line.endpoint for line in broken],
                }
                self.stdout.write(json.dumps(shown, indent=2, default=datetime.isoformat))
            case "sarif":
                results = [each.result for each in shadows if each.duplicates]
                self.stdout.write(_as_sarif(results, {DUPLICATES: _DUPLICATES_TEXT}))
            case _:
                self.stdout.write("\n".join([*_warning(), *_shadow_table(shadows, broken)]))
        if options["reset"]:
            for using in _databases():
                IdempotencyObservation.objects.using(using).all().delete()


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


def _write_baseline(file: Path, accepted: Counter[tuple[str, str]]) -> None:
    """Write a status for each endpoint, or a list if several have its name."""
    statuses: dict[str, list[str]] = {}
    for name, status in sorted(accepted.elements()):
        statuses.setdefault(name, []).append(status)
    values = {name: each if len(each) > 1 else each[0] for name, each in statuses.items()}
    try:
        file.write_text(f"{json.dumps(values, indent=2)}\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"The baseline {file} cannot be written: {error}") from error


def _accepted(file: Path) -> Counter[tuple[str, str]]:
    """How often a baseline has an endpoint with a status."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(
            f"The baseline {file} does not exist. Write it with --update-baseline."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"The baseline {file} cannot be read: {error}") from error
    accepted = [
        (name, status)
        for name, value in (values if isinstance(values, dict) else {}).items()
        for status in (value if isinstance(value, list) else [value])
    ]
    if not isinstance(values, dict) or any(status not in [*REPORTED] for _, status in accepted):
        raise CommandError(
            f"The baseline {file} must be a JSON object such as "
            '{"POST /api/orders/": "unprotected"}. Write it with --update-baseline.'
        )
    return Counter(accepted)


def _known(lines: Iterable[Line], accepted: Counter[tuple[str, str]]) -> list[bool]:
    """Whether each line is in the baseline, which has as many equal ones as were accepted."""
    seen: Counter[tuple[str, str]] = Counter()
    known = []
    for line in lines:
        seen[line.key] += 1
        known.append(seen[line.key] <= accepted[line.key])
    return known


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
    file, number = _source(endpoint.defined)
    known: dict[str, Any] = {
        "urlconf": urlconf,
        "route": endpoint.route,
        "method": endpoint.method,
        "view": endpoint.view_name,
        "file": file,
        "number": number,
        "mutation": endpoint.mutation,
    }
    if endpoint.problem:
        return Line(**known, status="broken", how=endpoint.how, problem=endpoint.problem)
    if endpoint.how == "inbox":
        return Line(**known, status="derived", how=endpoint.how)
    if endpoint.policy is None:
        return Line(**known, status=endpoint.how or "unprotected")
    policy = endpoint.policy.resolved()
    if endpoint.observes:
        return Line(**known, status="observed", how=endpoint.how, mode=policy.mode)
    status = "required" if policy.requires_key(endpoint.method.replace("*", "POST")) else "optional"
    return Line(
        **known,
        status="derived" if not keys.reads_header(policy.key) else status,
        how=endpoint.how,
        mode="auto" if policy.mode == "observe" else policy.mode,  # no mutation is observed
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


def _warning() -> list[str]:
    """The first lines of a table if nothing is enforced."""
    return [] if conf.enabled else [_SWITCHED_OFF, ""]


def _table(lines: Sequence[Line]) -> Iterator[str]:
    rows = [["Method", "Route", "Status", "By", "Mode", "View", "URLconf"]]
    rows += [
        [each.method, each.place, each.status, each.how, each.mode, each.view, each.urlconf]
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


def _head() -> dict[str, Any]:
    """What a JSON report says of the project."""
    return {"enabled": conf.enabled, "header": header_of(project_dialect())}


def _as_json(lines: Sequence[Line]) -> str:
    shown = [{field.name: getattr(line, field.name) for field in fields(line)} for line in lines]
    return json.dumps({**_head(), "endpoints": shown}, indent=2, ensure_ascii=False)


def _result(rule: str, name: str, text: str, file: str, number: int) -> dict[str, Any]:
    """A result of SARIF for an endpoint."""
    result: dict[str, Any] = {
        "ruleId": f"idempotency/{rule}",
        "level": _LEVELS[rule],
        "message": {"text": f"{name}: {text}"},
        "partialFingerprints": {"endpoint/v1": name},
    }
    if file:
        location = {"artifactLocation": {"uri": Path(file).as_posix()}}
        region = {"startLine": number}
        result["locations"] = [{"physicalLocation": {**location, "region": region}}]
    return result


def _results(lines: Sequence[Line], known: Sequence[bool]) -> Iterator[dict[str, Any]]:
    for line, is_known in zip(lines, known, strict=True):
        if not line.found:
            continue
        text = line.problem or REPORTED[line.status]
        result = _result(line.status, line.name, text, line.file, line.number)
        if is_known:
            result["suppressions"] = [{"kind": "external", "justification": "In the baseline."}]
        yield result


def _as_sarif(results: Iterable[dict[str, Any]], texts: Mapping[str, str]) -> str:
    """SARIF 2.1.0, for GitHub code scanning and others."""
    rules = [
        {
            "id": f"idempotency/{status}",
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": _LEVELS[status]},
        }
        for status, text in texts.items()
    ]
    driver = {
        "name": "idempotency_django",
        "version": __version__,
        "informationUri": "https://idempotency-django.readthedocs.io/",
        "rules": rules,
    }
    run: dict[str, Any] = {"tool": {"driver": driver}, "results": list(results)}
    if not conf.enabled:
        told = {"level": "warning", "message": {"text": _SWITCHED_OFF}}
        invocation = {"executionSuccessful": True, "toolConfigurationNotifications": [told]}
        run["invocations"] = [invocation]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


# The shadow mode.


@dataclass(slots=True)
class Shadow:
    """An observed endpoint, and what was counted there.

    Attributes:
        endpoint: the method and the route.
        since: when its first request was counted; ``None``: there was none.
        counts: the requests by outcome; see :data:`~idempotency_django.http.shadow.OUTCOMES`.
        differs: the duplicates whose response was not the first one.
        effects: what its view did outside of the database, and how often a duplicate did it again.
        file: where the view is defined, relative to the working directory; empty: unknown.
        number: of the line there.
    """

    endpoint: str
    since: datetime | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(shadow.OUTCOMES, 0))
    differs: int = 0
    effects: list[dict[str, Any]] = field(default_factory=list)
    file: str = ""
    number: int = 1

    @property
    def duplicates(self) -> int:
        """How many duplicates were executed."""
        return sum(self.counts[outcome] for outcome in shadow.DUPLICATES)

    @property
    def result(self) -> dict[str, Any]:
        """Its finding for SARIF."""
        told = _counted(self.duplicates, "duplicate")
        text = f"executed {told}. {' '.join(self.told_effects)}".rstrip()
        return _result(DUPLICATES, self.endpoint, text, self.file, self.number)

    @property
    def told_effects(self) -> list[str]:
        """A sentence for each of its effects."""
        return [
            f"It {DID[each['kind']]} {each['peer']}"
            f"{' at ' + each['where'] if each['where'] else ''}, "
            f"{_counted(each['repeated'], 'time')} again."
            for each in self.effects
        ]

    def add(self, row: IdempotencyObservation) -> None:
        """Add what was counted."""
        self.since = min(self.since or row.since, row.since)
        if row.what == shadow.DIFFERS:
            self.differs += row.count
        elif row.what in self.counts:
            self.counts[row.what] += row.count
        else:
            effect = {"kind": row.what, "peer": row.peer, "where": row.place}
            self.effects.append({**effect, "repeated": row.count})


def _databases() -> set[str]:
    """The databases with counts: those of the stores, or that of the model."""
    usual = router.db_for_write(IdempotencyObservation)
    return {stores[alias].using or usual for alias in conf.stores}


def _shadows(lines: Iterable[Line]) -> list[Shadow]:
    """The observed endpoints, and those that have been: most duplicates first."""
    known = {line.endpoint: line for line in lines}
    shadows = {name: Shadow(name) for name, line in known.items() if line.status == "observed"}
    for using in _databases():
        for row in IdempotencyObservation.objects.using(using).order_by("pk"):
            shadows.setdefault(row.endpoint, Shadow(row.endpoint)).add(row)
            any_method = f"* {row.endpoint.partition(' ')[2]}"
            if any_method in known:  # its methods are known only by their requests
                known.setdefault(row.endpoint, known[any_method])
                shadows.pop(any_method, None)
    for name, each in shadows.items():
        if line := known.get(name):
            each.file, each.number = line.file, line.number
    return sorted(shadows.values(), key=lambda each: (-each.duplicates, each.endpoint))


def _shadow_table(shadows: Sequence[Shadow], broken: Sequence[Line]) -> Iterator[str]:
    rows = [["Endpoint", "Requests", *_COLUMNS.values(), "Response differs"]]
    rows += [
        [
            each.endpoint,
            str(sum(each.counts.values())),
            *(str(each.counts[outcome]) for outcome in _COLUMNS),
            str(each.differs),
        ]
        for each in shadows
    ]
    for text, shown in zip(_aligned(rows), [None, *shadows], strict=True):
        yield text
        if shown:
            yield from (f"    {sentence}" for sentence in shown.told_effects)
    yield ""
    found = [each for each in shadows if each.duplicates]
    total = sum(each.duplicates for each in found)
    since = min((each.since for each in shadows if each.since), default=None)
    begun = f" since {since:%Y-%m-%d %H:%M}" if since else ""
    yield f"{len(found)} of {len(shadows)} observed endpoints had duplicates: {total}{begun}."
    if broken:
        names = ", ".join(line.endpoint for line in broken)
        yield f"Not observed, because they cannot be protected: {names}. See idempotency_report."
