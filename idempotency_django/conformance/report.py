"""Reports: what each requirement came to, as text, JSON, or JUnit's XML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final
from xml.etree import ElementTree as Xml

from .catalogue import Dialect
from .runner import Target, Verdict

WORDS: Final = {"passed": "ok", "failed": "FAILED", "not tested": "not tested"}
CONTROLS: Final = dict.fromkeys({*range(32)} - {9, 10, 13})
"""Characters that XML does not allow."""

Report = Callable[[Target, Dialect, Sequence[Verdict]], str]


def text(target: Target, dialect: Dialect, verdicts: Sequence[Verdict]) -> str:
    """For people: a line for each requirement, and what failed at the end of it."""
    lines = [f"{target.method} {target.url}", f"Dialect: {dialect.name} ({dialect.says})", ""]
    for verdict in verdicts:
        requirement = verdict.requirement
        head = f"{requirement.id}  {WORDS[verdict.result]:<10}  {requirement.level:<6}"
        lines.append(f"{head}  {requirement.text}")
        if verdict.reason:
            lines.append(f"{'':22}{verdict.reason}")
        if verdict.result == "failed":
            lines.append(f"{'':22}Source: {requirement.source}")
            lines += [f"{'':24}{line}" for line in verdict.exchanges]
    return "\n".join([*lines, "", summary(verdicts), ""])


def summary(verdicts: Sequence[Verdict]) -> str:
    """One sentence with the numbers."""
    results = Counter(verdict.result for verdict in verdicts)
    levels = Counter(each.requirement.level for each in verdicts if each.result == "failed")
    failed = ", ".join(f"{levels[level]} {level}" for level in sorted(levels))
    many = "s" * (len(verdicts) != 1)
    return (
        f"{len(verdicts)} requirement{many}: {results['passed']} passed, {results['failed']} failed"
        f"{f' ({failed})' if failed else ''}, {results['not tested']} not tested."
    )


def as_json(target: Target, dialect: Dialect, verdicts: Sequence[Verdict]) -> str:
    """For programs."""
    document = {
        "method": target.method,
        "url": target.url,
        "dialect": dialect.name,
        "requirements": [
            {
                "id": each.requirement.id,
                "level": each.requirement.level,
                "text": each.requirement.text,
                "source": each.requirement.source,
                "result": each.result,
                "reason": each.reason,
                "exchanges": each.exchanges,
            }
            for each in verdicts
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def junit(target: Target, dialect: Dialect, verdicts: Sequence[Verdict]) -> str:
    """For CI servers; what was not tested is skipped there, and so is a MAY that is not met."""
    suite = Xml.Element("testsuite", name=f"{target.method} {target.url} ({dialect.name})")
    for verdict in verdicts:
        requirement = verdict.requirement
        name = f"{requirement.id} {requirement.level}: {requirement.text}"
        case = Xml.SubElement(suite, "testcase", classname="idempotency", name=name)
        if verdict.result == "passed":
            continue
        fatal = verdict.result == "failed" and requirement.level != "MAY"
        message = verdict.reason.translate(CONTROLS)
        outcome = Xml.SubElement(case, "failure" if fatal else "skipped", message=message)
        outcome.text = "\n".join(verdict.exchanges).translate(CONTROLS)
    tags = Counter(each.tag for each in suite.iter())
    suite.set("tests", str(len(verdicts)))
    suite.set("failures", str(tags["failure"]))
    suite.set("skipped", str(tags["skipped"]))
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


FORMATS: Final[dict[str, Report]] = {"text": text, "json": as_json, "junit": junit}
