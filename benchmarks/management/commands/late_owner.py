"""A process that owns operations for longer than their leases."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Any

from django.core.management import BaseCommand, CommandParser

from benchmarks.functions import LATE, Order, made_by, protected
from benchmarks.project import ORDER


class Command(BaseCommand):
    help = (
        "Reads keys, one a line, and calls the protected function with each: says 'running' from "
        "within, waits for one more line, creates its order, and says whose result it was given."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("variant")
        parser.add_argument("lease", type=float, help="in seconds")

    def handle(self, *, variant: str, lease: float, **_: Any) -> None:
        def work(order: Order) -> dict[str, Any]:
            self._say("running")
            sys.stdin.readline()
            return made_by(LATE, order)

        logging.disable(logging.WARNING)  # that it is late, which is what it is for
        function = protected(variant, work, timedelta(seconds=lease))
        self._say("ready")
        while key := sys.stdin.readline().strip():
            try:
                self._say(function(key, {**ORDER, "reference": key})["maker"])
            except Exception as error:  # noqa: BLE001  # what it says is measured
                self._say(type(error).__name__)

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
