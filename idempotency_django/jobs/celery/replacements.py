"""Tasks that are replaced: what replaces an operation is another one, also under its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from celery import current_task
from celery.signals import before_task_publish

from ...policy import keys, scopes
from ...policy.canonical import content_digest

REPLACED: Final = "idempotency_replaced"
"""The header of what replaces a task: how often each operation was replaced before, by digest."""

_REMEMBERED: Final = 500
"""Operations in the header, or a task that replaces itself for ever under new keys would send
messages that no broker takes."""


def names_of(task: str, key: str, request: Any) -> tuple[str, str]:
    """The key and the scope of an operation.

    A replacement has the id of what it replaces, and often its name and key. Its message tells how
    often the operation was replaced before, and still does when it is delivered again.

    Args:
        task: the task's name.
        key: its id, or what its ``key`` makes of the arguments.
        request: of its message; ``None``: it is called as a function.
    """
    times = _replaced(request).get(_digest(task, key)) if request else None
    if not times:
        return key, scopes.fit(f"task:{task}")
    return keys.fit(f"{key}:{times}"), scopes.fit(f"replacement:{task}")


def name_replacement(signature: Any, task: str, key: str, request: Any) -> None:
    """Tell what replaces an operation that it does so.

    Args:
        signature: is sent, with the id that the task has.
        task: the name of the task that is replaced.
        key: as in :func:`names_of`.
        request: of the message of the task that is replaced.
    """
    replaced, name = _replaced(request), _digest(task, key)
    times = replaced.pop(name, 0) + 1
    latest = dict([*replaced.items(), (name, times)][-_REMEMBERED:])
    for leaf in _leaves(signature):
        options = leaf["options"]
        options["headers"] = {**(options.get("headers") or {}), REPLACED: latest}


def pass_on(*, headers: dict[str, Any], **_: Any) -> None:
    """Keep what a message tells where one of Celery's own tasks replaces or repeats itself."""
    if not current_task or current_task.request.id != headers.get("id"):
        return
    if replaced := _replaced(current_task.request):
        headers.setdefault(REPLACED, replaced)


before_task_publish.connect(pass_on, dispatch_uid=__name__)


def _replaced(request: Any) -> dict[str, int]:
    headers = request.headers or {}  # there only, where the task is eager
    return dict(request.get(REPLACED) or headers.get(REPLACED) or {})


def _digest(task: str, key: str) -> str:
    return content_digest(task, key)


def _leaves(signature: Mapping[str, Any]) -> Iterator[Any]:
    """The tasks of a chain, a group or a chord; of others, themselves."""
    if signature.get("subtask_type") not in ("chain", "group", "chord"):
        yield signature
        return
    for name in ("tasks", "header", "body"):
        parts = signature["kwargs"].get(name) or ()
        for part in (parts,) if isinstance(parts, Mapping) else parts:
            yield from _leaves(part)
