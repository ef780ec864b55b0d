"""Which operation a task's message comes from: its reference travels in a header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery import current_task
from celery.signals import before_task_publish

from ...engine.context import current_execution

CAUSED_BY: Final = "idempotency_caused_by"
"""The header: the reference of the record of the operation that sent the message."""


def name_parent(*, headers: dict[str, Any], **_: Any) -> None:
    """Tell a message which operation sends it. A task that sends itself again has no new parent."""
    execution = current_execution()
    if execution is None or CAUSED_BY in headers:
        return
    if current_task and _is_again(headers, current_task.request):
        return
    headers[CAUSED_BY] = execution.reference


def _is_again(headers: Mapping[str, Any], request: Any) -> bool:
    nesting = headers.get("replaced_task_nesting")  # more: it is what replaces the task
    return bool(request.id == headers.get("id") and request.replaced_task_nesting == nesting)


# Of each message that this process sends: an HTTP request's, too.
before_task_publish.connect(name_parent, dispatch_uid=__name__)


def with_parent(options: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """The options of a task that Celery sends later, with the operation that it comes from."""
    return {**options, "headers": {CAUSED_BY: reference, **(options.get("headers") or {})}}
