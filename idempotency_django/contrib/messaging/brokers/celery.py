"""Celery's tasks: the extra ``[celery]``."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

from django.utils.module_loading import autodiscover_modules, import_string

from ....conf import seconds_of
from ....lazy import extra
from ...celery import CAUSED_BY
from ..events import Event
from .base import Publisher

with extra("celery"):
    from celery import current_app
    from kombu.exceptions import OperationalError
    from kombu.utils.json import loads

    from .kombu import limit_silence

_AGAIN: Final = {"max_retries": 1, "interval_start": 0}
"""The broker may have closed the idle connection."""

_NO_EXCHANGE: Final = (403, 404)
"""RabbitMQ's error codes for a missing exchange and for a missing write permission."""


class CeleryPublisher(Publisher):
    """Sends each message as a Celery task, whose id is the message's.

    The message's type is the task's name. Its data is ``{"args": […], "kwargs": {…}}``, of which
    both may be missing. :meth:`~idempotency_django.contrib.celery.IdempotentTask.enqueue_once`
    writes such messages. RabbitMQ confirms each.

    Args:
        topic: the topic.
        app: the path of the Celery app, such as ``"shop.celery.app"``; by default, the current one.
        timeout: how long the broker may take to accept the connection, or a message.
    """

    def __init__(
        self, topic: str, *, app: str = "", timeout: timedelta = timedelta(seconds=10)
    ) -> None:
        super().__init__(topic)
        self._app: Any = import_string(app) if app else current_app
        self._timeout = seconds_of("timeout", timeout)
        self._connection: Any = None
        self._producer: Any = None

    def send(self, message: Event) -> None:
        task = self._tasks.get(message.type)
        args, kwargs = _arguments(message)
        options = {
            "task_id": message.id,
            "headers": {CAUSED_BY: message.caused_by},
            "add_to_parent": False,
        }
        if not self._app.conf.task_always_eager:
            options |= {"timeout": self._timeout, "confirm_timeout": self._timeout}
            options |= {"retry": True, "retry_policy": _AGAIN, "producer": self._opened()}
        if task is None:  # other workers know it
            self._app.send_task(message.type, args, kwargs, **options)
        else:
            task.apply_async(args, kwargs, **options)

    def is_outage(self, error: Exception) -> bool:
        is_missing = getattr(error, "code", None) in _NO_EXCHANGE
        return is_missing or isinstance(error, OSError | OperationalError | ImportError)

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)  # also where the broker does not reply

    @cached_property
    def _tasks(self) -> Any:
        """The project's tasks: each of them says how it is sent."""
        autodiscover_modules("tasks")
        return self._app.tasks

    def _opened(self) -> Any:
        if self._producer is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=self._timeout, transport_options={"confirm_publish": True}
            )
            limit_silence(self._connection, self._timeout)
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer


def _arguments(message: Event) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the task. What Celery's JSON can hold keeps its type: dates, decimals, …

    Raises:
        ValueError: the data are no arguments. Celery raises others where it cannot read them.
    """
    data = message.data
    known = isinstance(data, dict) and not data.keys() - {"args", "kwargs"}
    args, kwargs = (data.get("args", []), data.get("kwargs", {})) if known else (None, None)
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise ValueError(  # noqa: TRY004  # of a message, not of an argument
            f"The message for the task {message.type} does not contain the task's arguments. "
            'Publish {"args": […], "kwargs": {…}}, or use enqueue_once().'
        )
    return loads(json.dumps(args)), loads(json.dumps(kwargs))
