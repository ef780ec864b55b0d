"""Checks of ``IDEMPOTENCY["CONSUMERS"]``, which commands and tasks find consumers by."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.checks import CheckMessage, Error

from ..contrib.messaging.conf import conf
from ..contrib.messaging.consumers import Consumer, consumer_at
from .configuration import tried


def check_consumers(**_: Any) -> list[CheckMessage]:
    """Report paths that lead to no consumer, and two consumers of one name."""
    problems: list[CheckMessage] = []
    named: dict[str, Consumer] = {}
    for path in tried(lambda: conf.consumers)[0] or ():  # else E002
        consumer, error = tried(partial(consumer_at, path))
        if consumer is None:
            problems.append(
                Error(
                    f"IDEMPOTENCY['CONSUMERS']: {error}",
                    hint="Correct the path, or remove it from the list.",
                    id="idempotency_django.E050",
                )
            )
        elif named.setdefault(consumer.name, consumer) is not consumer:
            problems.append(
                Error(
                    f"IDEMPOTENCY['CONSUMERS'] lists two consumers called {consumer.name!r}; the "
                    f"second is at {path!r}. Each would treat the other's events as duplicates.",
                    hint="Rename one of them.",
                    id="idempotency_django.E050",
                )
            )
    return problems
