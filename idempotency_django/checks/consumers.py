"""Checks of ``IDEMPOTENCY["CONSUMERS"]``, which commands and tasks find consumers by."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from ..conf import conf
from ..messaging.consumers import Consumer, consumer_at


def check_consumers(**_: Any) -> list[CheckMessage]:
    """Report paths that lead to no consumer, and two consumers of one name."""
    try:
        paths = conf.consumers
    except ImproperlyConfigured:
        return []  # E002
    problems: list[CheckMessage] = []
    named: dict[str, Consumer] = {}
    for path in paths:
        try:
            consumer = consumer_at(path)
        except ImproperlyConfigured as error:
            problems.append(
                Error(
                    f"IDEMPOTENCY['CONSUMERS']: {error}",
                    hint="Correct the path, or remove it from the list.",
                    id="idempotency_django.E050",
                )
            )
            continue
        if named.setdefault(consumer.name, consumer) is not consumer:
            problems.append(
                Error(
                    f"IDEMPOTENCY['CONSUMERS'] lists two consumers called {consumer.name!r}; the "
                    f"second is at {path!r}. They would take each other's events for duplicates.",
                    hint="Give one of them another name.",
                    id="idempotency_django.E051",
                )
            )
    return problems
