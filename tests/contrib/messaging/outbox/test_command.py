"""``run_messaging`` sends what is due, once or until it is told to stop, and says what it did."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from .conftest import Broker, publish_order

pytestmark = pytest.mark.django_db(transaction=True)


def relay(*arguments: str, **options: Any) -> str:
    """Run the command; what it prints."""
    said = StringIO()
    call_command("run_messaging", *arguments, stdout=said, **options)
    return said.getvalue()


@pytest.mark.parametrize("verbosity", [0, 1])
def test_the_relay_runs_until_sigterm(broker: type[Broker], verbosity: int) -> None:
    """It sends what is due, completes what it is at when it is told to stop, and ends."""

    def terminate(messages: Sequence[object]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    broker.before = staticmethod(terminate)  # type: ignore[assignment]
    publish_order()
    said = relay(verbosity=verbosity)
    assert len(broker.got) == 1
    assert ("It ends on SIGTERM" in said) == bool(verbosity)


def test_once_says_what_was_sent_and_what_was_not(broker: type[Broker]) -> None:
    """Nothing was due, one was sent, one was refused."""
    assert relay("--once") == "Messages: none was due.\n"
    publish_order()
    assert relay("--once") == "Messages: 1 sent.\n"
    broker.refuse = staticmethod(lambda message: ValueError("no"))  # type: ignore[assignment]
    publish_order()
    assert relay("--once") == "Messages: 1 failed.\n"
    assert relay("--once", verbosity=0) == ""
