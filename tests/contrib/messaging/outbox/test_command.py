"""``run_messaging`` sends what is due, once or until it is told to stop, and says what it did."""

from __future__ import annotations

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


def test_once_says_what_was_sent_and_what_was_not(broker: type[Broker]) -> None:
    """Nothing was due, one was sent, one was refused."""
    assert relay("--once") == "Messages: none was due.\n"
    publish_order()
    assert relay("--once") == "Messages: 1 sent.\n"
    broker.refuse = staticmethod(lambda message: ValueError("no"))  # type: ignore[assignment]
    publish_order()
    assert relay("--once") == "Messages: 1 failed.\n"
    assert relay("--once", verbosity=0) == ""
