"""Celery's tasks: the extra ``[celery]``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final

from celery import Celery, current_app
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules, import_string
from kombu.exceptions import OperationalError
from kombu.utils.json import loads

from ....conf import seconds_of
from ...celery import CAUSED_BY
from .base import Outgoing, Publisher

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
        self._path = app
        self._timeout = seconds_of("timeout", timeout)
        self._connection: Any = None
        self._producer: Any = None
        self._app: Any = None

    def send(self, message: Outgoing) -> Exception | None:
        try:
            self._apply(message)
        except (OSError, OperationalError, ImportError):
            raise
        except Exception as error:
            if getattr(error, "code", None) in _NO_EXCHANGE:
                raise
            return error  # any error is the message's
        return None

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)  # also where the broker does not reply

    def check(self) -> list[CheckMessage]:
        try:
            self._found()
        except ImproperlyConfigured as error:
            return [Error(str(error), id="idempotency_django.E043")]
        return []

    def _apply(self, message: Outgoing) -> None:
        app = self._open()
        args, kwargs = _arguments(message)
        options = {
            "task_id": message.message_id,
            "headers": {**message.headers, CAUSED_BY: message.reference},
            "add_to_parent": False,
        }
        if not app.conf.task_always_eager:
            options |= {"timeout": self._timeout, "confirm_timeout": self._timeout}
            options |= {"retry": True, "retry_policy": _AGAIN, "producer": self._made(app)}
        task = app.tasks.get(message.type)
        if task is None:  # other workers know it
            app.send_task(message.type, args, kwargs, **options)
        else:
            task.apply_async(args, kwargs, **options)

    def _open(self) -> Any:
        """The app, which knows the project's tasks: each of them says how it is sent."""
        if self._app is None:
            self._app = self._found()
            autodiscover_modules("tasks")
        return self._app

    def _made(self, app: Any) -> Any:
        if self._producer is None:
            self._connection = app.connection_for_write(
                connect_timeout=self._timeout, transport_options={"confirm_publish": True}
            )
            self._producer = app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer

    def _found(self) -> Any:
        if not self._path:
            return current_app
        try:
            app = import_string(self._path)
        except ImportError as error:
            raise ImproperlyConfigured(
                f"The topic {self.topic!r} of the outbox uses the Celery app {self._path!r}, "
                f"which cannot be imported: {error}. Pass a path such as 'shop.celery.app'."
            ) from error
        if isinstance(app, Celery):
            return app
        raise ImproperlyConfigured(
            f"The topic {self.topic!r} of the outbox uses the Celery app {self._path!r}, which is "
            f"a {type(app).__name__}. Pass a path such as 'shop.celery.app'."
        )


def _arguments(message: Outgoing) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the task. What Celery's JSON can hold keeps its type: dates, decimals, …

    Raises:
        ValueError: the data are no arguments, or none that Celery's JSON can read.
    """
    data = message.data
    known = isinstance(data, dict) and not data.keys() - {"args", "kwargs"}
    args, kwargs = (data.get("args", []), data.get("kwargs", {})) if known else (None, None)
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise ValueError(  # noqa: TRY004  # of a message, not of an argument
            f"The message for the task {message.type} does not contain the task's arguments. "
            'Publish {"args": […], "kwargs": {…}}, or use enqueue_once().'
        )
    try:
        return loads(json.dumps(args)), loads(json.dumps(kwargs))
    except Exception as error:  # any error of a value that does not match its type
        raise ValueError(
            f"An argument of the task {message.type} has the keys __type__ and __value__, which "
            f"Celery's JSON cannot decode: {error!r}. Publish a client's data as a string."
        ) from error
