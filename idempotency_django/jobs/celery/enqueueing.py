"""Tasks that are written into the outbox, instead of being sent to the broker at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from kombu.utils.json import dumps

from ...planning import Plan
from ...records import Status
from ..enqueueing import enqueue

LONGEST_WINDOW: Final = timedelta(days=30)
"""For how long the outbox keeps a message at most, so that its task is not enqueued again."""

_MARKS: Final = {"__type__", "__value__"}
"""The keys of what Celery's JSON makes of a value that JSON has no type for."""


def enqueued(task: str, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan | None) -> str:
    """Write the message of a task; the id that the task will have.

    Args:
        task: its name.
        args: positional arguments.
        kwargs: keyword arguments.
        plan: of the operation that its key names; ``None``: it has no key.

    Raises:
        ImproperlyConfigured: there is no outbox, or no transaction.
        TypeError: Celery's JSON cannot hold an argument, or would make another one of it.
    """
    write = enqueue()
    try:
        plain_args, plain_kwargs = json.loads(dumps(args)), json.loads(dumps(kwargs))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"An argument of the task {task} is not JSON, so the outbox cannot keep it: {error}. "
            "Pass plain data, for example a primary key."
        ) from error
    _refuse_marks(task, [args, kwargs])  # nothing in them contains itself: JSON would refuse that
    if plan is None:
        return write(
            task, plain_args, plain_kwargs, dedup_id=None, window=None, unfinished=lambda: False
        )
    operation = plan.operation

    def unfinished() -> bool:
        record = plan.store.get(operation.key, operation.scope)
        # One that is held waits for an operator, whatever is sent.
        return (
            record is not None
            and not record.held
            and (record.status is Status.FAILED or record.interrupted)
        )

    # With what is asked for: other arguments under the key are for the task to refuse.
    dedup_id = f"{operation.key} {operation.content}"
    window = min(operation.ttl or LONGEST_WINDOW, LONGEST_WINDOW)
    return write(
        task, plain_args, plain_kwargs, dedup_id=dedup_id, window=window, unfinished=unfinished
    )


def _refuse_marks(task: str, arguments: Any) -> None:
    """Refuse a dict that Celery's JSON would read as a date or the like: a client can send one."""
    pending = [arguments]
    while pending:
        match pending.pop():
            case Mapping() as item:
                if item.keys() == _MARKS:
                    raise TypeError(
                        f"An argument of the task {task} has a dict of __type__ and __value__, "
                        "which Celery's JSON reads as a value of another type. Pass what a client "
                        "has sent as a text."
                    )
                pending += item.values()
            case list() | tuple() as item:
                pending += item
