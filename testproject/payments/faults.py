"""Simulated faults: the header ``X-Simulate`` selects one if ``SIMULATE=1``.

The header lists faults, separated by semicolons: ``sleep-ms=300; kill=after-effect``.

=======================  ========================================================
``sleep-ms=300``         work that long before the effect
``raise``                raise an exception after the effect
``status=503``           respond with this status after the effect
``kill=before-effect``   SIGKILL the process that serves the request …
``kill=after-effect``    … when the effect is made and not committed
``kill=after-commit``    … when it is committed, before the response
=======================  ========================================================

The effect of a transfer is its third step, the credit. Before it comes:

=======================  ========================================================
``kill=after-debit``     … when the debit is stored
``kill=during-ledger``   … when the ledger has responded, and that is not stored
``kill=after-ledger``    … when the ledger's response is stored
=======================  ========================================================
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import transaction

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request


class SimulatedError(Exception):
    """The error of the fault ``raise``."""


class Faults:
    """The faults that a request asks for."""

    def __init__(self, request: HttpRequest | Request) -> None:
        header = request.headers.get("X-Simulate", "") if settings.SIMULATE else ""
        named = (fault.strip().partition("=") for fault in header.split(";"))
        self._asked = {name: value for name, _, value in named}

    def sleep(self) -> None:
        time.sleep(self.seconds)

    async def asleep(self) -> None:
        await asyncio.sleep(self.seconds)

    def before_effect(self) -> None:
        self.reached("before-effect")

    def after_effect(self) -> None:
        self.reached("after-effect")
        transaction.on_commit(lambda: self.reached("after-commit"))
        if "raise" in self._asked:
            raise SimulatedError

    def status(self, otherwise: int) -> int:
        return int(self._asked.get("status", otherwise))

    def reached(self, moment: str) -> None:
        """End here, if that is the moment to be killed at."""
        if self._asked.get("kill") == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def seconds(self) -> float:
        """Seconds of work before the effect or, in a job, after it."""
        return int(self._asked.get("sleep-ms", 0)) / 1000
