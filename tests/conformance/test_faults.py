"""The runner names what an API does not do, and nothing else."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from idempotency_django.conformance import runner
from idempotency_django.conformance.catalogue import Requirement, dialects, requirements
from idempotency_django.conformance.runner import Count, Runner, Target, Verdict
from tests.conformance.api import serving

DIALECTS, REQUIREMENTS = dialects(), requirements()

# The numbers of the requirements that an API with the fault does not meet.
FAULTS = {
    "200 for another body": "020",
    "500 for a duplicate": "011",
    "a duplicate frees the claim": "010 012 015",
    "accepts a missing key": "040 041",
    "an effect before validation": "060 061",
    "another body frees the key": "023",
    "another body is another request": "015 020 021 023 027 028",
    "cacheable": "006",
    "case-insensitive keys": "051",
    "compares bytes": "027 028",
    "conflicts without Retry-After": "013",
    "cuts long keys": "043 044 048",
    "errors in plain text": "014 022 042",
    "executes, then looks": "002 004 008 010 015 020 021 023 052 053 061 062 065 066",
    "fails on a large body": "066",
    "fails on a long key": "047",
    "fails on what is not JSON": "067",
    "fails outside ASCII": "049",
    "forgets at a restart": "008",
    "ignores the body": "020",
    "ignores the key": "007 015 020 021 023 051",
    "keeps 5xx": "062",
    "keeps the effect of a failure": "062",
    "key without endpoint": "024",
    "key without method": "025",
    "key without query": "026",
    "key without user": "030 032",
    "lenient about quotation marks": "043 044 045 046 053",
    "lock around the look-up": "010 012 015",
    "loses Location": "003",
    "marks everything": "004 007 024 025 026 030 051",
    "no marker": "004",
    "others are refused": "020 030 032",
    "replays before authentication": "020 024 025 026 029 030 031",
    "replays on GET": "020 025 026 029",
    "replays with another status": "001 008 012 023 027 028 032 061 066",
    "takes an empty key for none": "043 044",
    "takes the first of two lines": "046",
    "takes the whole line for the key": "044 045 046 052 053",
    "waits and invents": "001 003 004 008 012 020 023 027 028 032 061 066",
}
OF_DIALECTS = {
    ("acp", "no marker"): "005",
    ("paypal", "key without user"): "030 032",
    ("oasis", "executes what is too old"): "054",
    ("stripe", "forgets 500"): "063",
    ("stripe", "refuses the longest key"): "050",
}
# Faults that wait for other requests, so that they are tried with one requirement only.
OF_LEAVING = {"forgets who left": "065", "wedged by a client that left": "064"}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PATIENCE", 5.0)
    monkeypatch.setattr(runner, "SETTLING", 0.0)


@contextmanager
def target(dialect: str, fault: str = "") -> Iterator[Target]:
    with serving(DIALECTS[dialect], fault) as url:
        restart = f"import urllib.request as u; u.urlopen('{url}/restart')"
        yield Target(
            f"{url}/charges",
            body={"amount": 5, "reference": "{unique}"},
            other_body={"amount": 6, "reference": "{unique}"},
            invalid_body={"amount": "x", "reference": "{unique}"},
            headers={"Authorization": "Bearer alice"},
            other_headers={"Authorization": "Bearer bob"},
            failing_headers={"X-Fail": "1"},
            other_url=f"{url}/refunds",
            count=Count(f"{url}/effects?reference={{unique}}", "/counted/n"),
            required=True,
            restart=shlex.join([sys.executable, "-IS", "-c", restart]),
        )


def verdicts(dialect: str, at: Target, chosen: list[Requirement]) -> list[Verdict]:
    tested = Runner(at, DIALECTS[dialect])
    return [tested.verdict(each) for each in chosen if each.applies_to(DIALECTS[dialect])]


def failures(dialect: str, fault: str, chosen: list[Requirement] = REQUIREMENTS) -> dict[str, str]:
    """The numbers of the requirements that are not met, and why."""
    with target(dialect, fault) as at:
        found = verdicts(dialect, at, chosen)
    return {
        each.requirement.id.removeprefix("IDEM-"): "\n".join([each.reason, *each.exchanges])
        for each in found
        if each.result == "failed"
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    """Each fault fails the requirements that it breaks, and no others."""
    found = failures("ietf", fault)

    assert list(found) == FAULTS[fault].split(), found


@pytest.mark.parametrize(("dialect", "fault"), OF_DIALECTS)
def test_a_fault_of_a_dialect_is_named(dialect: str, fault: str) -> None:
    """So does a fault in what only some dialects define."""
    found = failures(dialect, fault)

    assert list(found) == OF_DIALECTS[dialect, fault].split(), found


@pytest.mark.parametrize("fault", OF_LEAVING)
def test_a_fault_after_a_client_left_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API must neither forget what it did for a client that left, nor keep the key from it."""
    monkeypatch.setattr(runner, "PATIENCE", 0.5)
    number = OF_LEAVING[fault]
    [chosen] = [each for each in REQUIREMENTS if each.id == f"IDEM-{number}"]

    assert list(failures("ietf", fault, [chosen])) == [number]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_a_fault(dialect: str) -> None:
    """An API without a fault meets all requirements of its dialect."""
    with target(dialect) as at:
        found = verdicts(dialect, at, REQUIREMENTS)

    unmet = {each.requirement.id: each.reason for each in found if each.result != "passed"}
    if "max" not in DIALECTS[dialect].key:
        assert unmet.pop("IDEM-050") == "the dialect has no greatest length of a key"
    if not DIALECTS[dialect].statuses["mismatch"]:  # its documents leave it open
        assert unmet.pop("IDEM-020") == "the dialect does not say the status of mismatch"
    assert not unmet


def test_each_requirement_has_a_fault() -> None:
    """No requirement is there that no fault fails."""
    numbers = " ".join([*FAULTS.values(), *OF_DIALECTS.values(), *OF_LEAVING.values()]).split()

    assert {f"IDEM-{number}" for number in numbers} == {each.id for each in REQUIREMENTS}
