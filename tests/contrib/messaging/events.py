"""Events of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from idempotency_django.contrib.messaging import Event


def paid(number: str = "1", /, **changes: Any) -> Event:
    """An event, as its sender makes it."""
    given = {"id": number, "source": "/shop", "type": "order.paid", "data": {}}
    return Event(**given | changes)


def paid_in(folder: Path, number: str, **data: Any) -> Event:
    """An event for the consumer of the processes that are killed, which writes to the folder."""
    return paid(number, data={"folder": str(folder), **data})
