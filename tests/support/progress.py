"""The pytest plugin with which the parts of `make test` write to one terminal.

It writes whole lines with the part's name and time: when the part starts and ends, at each tenth of
its tests, and at once what failed. pytest itself then adds what was captured, and why it skipped.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from time import monotonic

import pytest

from tests import provision

started = monotonic()


def say(what: str) -> None:
    """Write it in one piece."""
    part, seconds = os.environ["TEST_PART"], monotonic() - started
    print(f"{part:13} {seconds:4.0f} s  {what}\n", end="", flush=True)


class Progress:
    """How many tests have ended, and how many there are."""

    def __init__(self) -> None:
        self._ended = self._all = 0

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
        if report.failed:
            say(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_runtest_logfinish(self) -> None:
        """Count the test."""
        tenths = self._ended * 10 // self._all
        self._ended += 1
        if self._ended * 10 // self._all > tenths:
            say(f"{self._ended} of {self._all}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many passed."""
        counts = {what: len(reports) for what, reports in terminalreporter.stats.items() if what}
        say("ends: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.pluginmanager.register(Progress())
