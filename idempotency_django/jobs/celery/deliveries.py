"""One delivery of a task's message: what it tells, and what Celery does after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery import states
from celery.backends.base import BaseKeyValueStoreBackend

from ...records import derived_key
from .parents import CAUSED_BY, with_parent

COPIES: Final = "idempotency_copies"
"""The header of a copy: how many were sent one after the other, this one included."""


class Delivery:
    """A delivery.

    Args:
        task: the task.
        request: its request, as Celery keeps it while the task runs.
    """

    def __init__(self, task: Any, request: Any) -> None:
        self.task = task
        self.request = request

    @property
    def copies(self) -> int:
        """How many copies were sent one after the other before this delivery; 0: it is no copy."""
        return int(self.request.get(COPIES) or 0)

    @property
    def caused_by(self) -> str:
        """The reference of the record of the operation that sent the message; empty: of none."""
        headers = self.request.headers or {}  # there only, where the task is eager
        return str(self.request.get(CAUSED_BY) or headers.get(CAUSED_BY) or "")

    def has_failed(self) -> bool:
        """Whether an earlier delivery of the message ended in a failure that Celery has recorded.

        Somebody may send a failed task again with its id; but what the broker delivers again, or
        was sent for the case that a worker dies, has been reported.
        """
        again = self.copies or (self.request.delivery_info or {}).get("redelivered")
        return bool(again) and self._state() == states.FAILURE

    def name_successors(self, reference: str) -> None:
        """Tell what Celery sends after the task where it comes from, and give it a lasting id.

        A worker that dies while it sends the callbacks leaves it to the next one to send them
        again. A callback that is an :class:`IdempotentTask` then has its effect once. The tasks of
        a chain have their ids from its beginning.

        Args:
            reference: of the task's record.
        """
        request = self.request
        links = enumerate(request.callbacks or ())
        request.callbacks = [self._named(link, reference, place) for place, link in links] or None
        if request.chain:
            *others, following = request.chain  # Celery takes them from the end
            request.chain = [*others, _caused(following, reference)]

    def _named(self, link: Mapping[str, Any], reference: str, place: int) -> Mapping[str, Any]:
        caused = _caused(link, reference)
        if link.get("subtask_type") or caused["options"].get("task_id"):
            return caused
        name = derived_key(scope="celery.link", key=self.request.id, content="", name=str(place))
        return {**caused, "options": {**caused["options"], "task_id": name}}

    def skip_what_was_sent(self) -> None:
        """Leave out of a replay what Celery has sent already: callbacks, and the chain's next task.

        It sends them before it stores the result. Where it counts the parts of a chord one by one,
        a part whose result is stored has been counted.
        """
        if self._state() != states.SUCCESS:
            return
        self.request.callbacks = self.request.chain = None
        if counts_parts(self.task.backend):
            self.request.chord = None

    def kept_result(self, error: Exception) -> Any:
        """The result as Celery has it, where our own record holds none.

        Raises:
            ResponseNotStored: Celery has none either.
        """
        if self.request.ignore_result or self.task.ignore_result:
            return None
        if self._state() != states.SUCCESS:
            raise error
        self.skip_what_was_sent()
        return self.task.backend.get_result(self.request.id)

    def _state(self) -> str:
        if self.request.is_eager:
            return states.PENDING
        return str(self.task.backend.get_state(self.request.id))


def _caused(successor: Mapping[str, Any], reference: str) -> dict[str, Any]:
    return {**successor, "options": with_parent(successor.get("options") or {}, reference)}


def counts_parts(backend: Any) -> bool:
    """Whether a result backend counts the parts of a chord without noting which were counted."""
    counting = BaseKeyValueStoreBackend.on_chord_part_return
    if getattr(type(backend), "on_chord_part_return", None) is counting:
        return bool(backend.implements_incr)
    return type(backend).__module__.startswith("django_celery_results.")
