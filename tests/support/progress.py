"""The pytest plugin with which the parts of `make test` write to one terminal.

It writes whole lines with the part's name and time: when the part starts and ends, at each tenth of
its tests, and at once what failed. pytest itself then adds what was captured, and why it skipped.
At the end it leaves a report for :mod:`tests.support.summary`.
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from time import monotonic

import pytest

from tests import provision

started = monotonic()


def say(what: str) -> None:
    """Write it in one piece."""
    part, seconds = os.environ["TEST_PART"], monotonic() - started
    print(f"{part:16} {seconds:4.0f} s  {what}\n", end="", flush=True)


class Progress:
    """How many tests have ended, how many there are, and what became of them."""

    def __init__(self) -> None:
        self._ended = self._all = 0
        self._counts: dict[str, int] = {}
        self._passed: set[str] = set()
        self._failed: list[str] = []
        self._seconds: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say how many there are."""
        self._all = len(session.items)
        say(f"starts {self._all} tests; {provision.pytest_report_header()}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, ...], tuple[str, ...]]:
        """Write no dots and other letters."""
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Show at once what failed."""
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(f"{report.nodeid} ({report.when})")
            say(f"FAILED {self._failed[-1]}\n{report.longreprtext}")
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid.partition("[")[0])

    def pytest_runtest_logfinish(self) -> None:
        """Count the test."""
        tenths = self._ended * 10 // self._all
        self._ended += 1
        if self._ended * 10 // self._all > tenths:
            say(f"{self._ended} of {self._all}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many passed."""
        stats = terminalreporter.stats
        self._counts = {what: len(reports) for what, reports in stats.items() if what}
        say("ends: " + ", ".join(f"{count} {what}" for what, count in self._counts.items()))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Write the report, when the servers have ended and their time is known, too."""
        used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        report = {
            "seconds": monotonic() - started,
            "cpu": sum(each.ru_utime + each.ru_stime for each in used),
            "counts": self._counts,
            "passed": sorted(self._passed),
            "failed": self._failed,
            "slowest": self._seconds.most_common(10),
        }
        path = Path(os.environ["TEST_REPORTS"], os.environ["TEST_PART"]).with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.pluginmanager.register(Progress())
