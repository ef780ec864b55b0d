"""The check of Celery's tasks.

The app imports this module if Celery is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery import current_app
from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.utils.module_loading import autodiscover_modules

from ..contrib.celery import IdempotentTask

_NO_APP: Final = "default"
"""The name of Celery's default app."""

_OPTIONS: Final = ("idempotency_policy", "idempotency", "key")


def check_celery(**_: Any) -> Iterator[CheckMessage]:
    """Tasks with options of an idempotent one, which nothing reads."""
    app: Any = current_app
    if app.main == _NO_APP:
        return
    # Celery's own way to import them would run the checks again, from within a worker.
    autodiscover_modules("tasks")
    for name, task in sorted(app.tasks.items()):
        options = vars(type(task))  # a key of a base class is the project's own affair
        given = [f"{option}=" for option in _OPTIONS if options.get(option) is not None]
        if given and not isinstance(task, IdempotentTask):
            yield Warning(
                f"The task {name} has {' and '.join(given)}, but is not an IdempotentTask, so each "
                "delivery and each call repeats its effects.",
                hint="Give it base=IdempotentTask, or remove these options.",
                id="idempotency_django.W061",
            )
