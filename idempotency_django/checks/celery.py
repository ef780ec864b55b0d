"""Checks of Celery's tasks and broker.

The app imports this module if Celery is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from celery import current_app
from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.utils.module_loading import autodiscover_modules

from ..contrib.celery import IdempotentTask
from ..policy import Policy
from .configuration import check_policy, each_once, tried

_NO_APP: Final = "default"
"""The name of Celery's default app."""

_OPTIONS: Final = ("idempotency_policy", "idempotency", "key")

_OWN: Final = ("celery.", "idempotency_django.")
"""The prefixes of names of tasks that are not the project's."""


def check_celery(**_: Any) -> Sequence[CheckMessage]:
    """The idempotent tasks, and whether the broker suits them."""
    app: Any = current_app
    if app.main == _NO_APP:
        return []
    # Celery's own way to import them would run the checks again, from within a worker.
    autodiscover_modules("tasks")
    everything = [task for name, task in sorted(app.tasks.items()) if not name.startswith(_OWN)]
    tasks = [task for task in everything if isinstance(task, IdempotentTask)]
    messages = [*_without_base(task for task in everything if task not in tasks)]
    for task in tasks:
        messages += check_policy(task.idempotency_policy, f"the task {task.name}")
    return [*each_once(messages), *_visibility(app, tasks)]


def _without_base(tasks: Iterable[Any]) -> Iterator[CheckMessage]:
    """Tasks with options of an idempotent one, which nothing reads."""
    for task in tasks:
        options = vars(type(task))  # a key of a base class is the project's own affair
        given = [name for name in _OPTIONS if options.get(name) is not None]
        if given:
            yield Warning(
                f"The task {task.name} has {' and '.join(f'{name}=' for name in given)}, but is "
                "not an IdempotentTask, so each delivery and each call repeats its effects.",
                hint="Give it base=IdempotentTask, or remove these options.",
                id="idempotency_django.W061",
            )


def _visibility(app: Any, tasks: Iterable[IdempotentTask]) -> Iterator[CheckMessage]:
    """Whether the broker delivers a message again before the lease of a dead owner is over."""
    seconds = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if not seconds:
        return
    for task in tasks:
        policy, _ = tried((task.idempotency_policy or Policy()).resolved)
        if policy and policy.lease.total_seconds() > seconds:  # else check_settings reports it
            yield Warning(
                f"The broker delivers a message again after {seconds} seconds, but the task "
                f"{task.name} has a lease of {policy.lease.total_seconds():g} seconds.",
                hint=(
                    "A repeated delivery only waits for the lease to end. Raise "
                    "visibility_timeout in broker_transport_options, or give the task's policy a "
                    "shorter lease."
                ),
                id="idempotency_django.W035",
            )
