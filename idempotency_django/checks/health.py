"""The check at deploy: whether the processes run that send, handle and purge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final

from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from ..errors import StoreUnavailable
from ..management import Limits, findings

LIMITS: Final = Limits(max_age=timedelta(hours=1), purge_age=timedelta(days=7))
"""Longer than a deployment, during which processes may be stopped."""


def check_processes(databases: Collection[str] | None = None, **_: Any) -> Sequence[CheckMessage]:
    """Report overdue work at ``check --deploy``, if a database is named."""
    if not databases:
        return []
    try:
        found = list(findings(LIMITS, databases))
    except (ImproperlyConfigured, DatabaseError, StoreUnavailable):
        return []  # other checks report it
    return [
        Warning(
            f"{each.what.capitalize()} for too long: {each.where!r}. {each.problem}",
            hint="For details, run: manage.py idempotency_status",
            id="idempotency_django.W055",
        )
        for each in found
        if each.idle
    ]
