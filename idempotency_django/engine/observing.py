"""The hooks around every execution, which ``IDEMPOTENCY["AROUND_EXECUTION"]`` lists.

A hook observes. It decides nothing: its errors are logged, and the execution continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from ..conf import conf
from ..errors import OperationInProgress
from ..stores.records import Operation
from .context import ExecutionContext
from .outcomes import Executed, Expired, Held, InProgress, Mismatched, Outcome, Replayed

logger = logging.getLogger("idempotency_django")

T = TypeVar("T")
_Execute = Callable[[ExecutionContext], T]
OutcomeName = Literal[
    "executed",
    "released",
    "failed",
    "replayed",
    "in_progress",
    "held",
    "expired",
    "mismatched",
    "refused",
]
_NAMES: Final[dict[type[Outcome], OutcomeName]] = {
    Replayed: "replayed",
    InProgress: "in_progress",
    Held: "held",
    Expired: "expired",
    Mismatched: "mismatched",
}


@dataclass(slots=True)
class ObservedExecution:
    """An execution as the hooks around it see it.

    Attributes:
        operation: what was asked for. It has no body, but the key: of which there are as many as
            requests, so it is no label of a metric.
        outcome: how it ended; empty until then. ``"executed"``: an answer is stored.
            ``"released"``: rolled back for an answer that is not kept; ``"failed"``: rolled back,
            or interrupted, because of an error or a 5xx. ``"replayed"``, ``"in_progress"``,
            ``"held"``, ``"expired"``, ``"mismatched"``: it was not executed now. ``"refused"``:
            neither executed nor replayed, because of ``error``.
        error: what was raised; ``None``: nothing was.
        attempt: the number of the attempt whose handler was called; ``None``: none was.
    """

    operation: Operation
    outcome: OutcomeName | Literal[""] = field(default="", init=False)
    error: BaseException | None = field(default=None, init=False, repr=False)
    attempt: int | None = field(default=None, init=False)


Hook = Callable[[ObservedExecution], AbstractContextManager[Any]]


class Observation:
    """The hooks around one execution: entered before its claim, left when it is committed.

    They are left without an error, so that none can be swallowed: it is in ``execution``.

    Args:
        operation: what is executed.
        hooks: the outermost first; none where the caller observes the execution.
    """

    def __init__(self, operation: Operation, hooks: Sequence[Hook]) -> None:
        self.execution = ObservedExecution(operation)
        self._hooks = hooks
        self._after: ExitStack | None = None
        self._entered: list[tuple[Hook, AbstractContextManager[Any]]] = []

    def __enter__(self) -> Observation:
        for hook in self._hooks:
            with _harmless(hook):
                around = hook(self.execution)
                around.__enter__()
                self._entered.append((hook, around))
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.raised(error)
        if self._after is None:
            self._leave()
        else:
            self._after.push(self._transactions_ended)

    def executing(self, execute: _Execute[T]) -> _Execute[T]:
        """The handler, or the coroutine function that is one, whose attempt is noted."""
        if not self._hooks:
            return execute

        def noted(execution: ExecutionContext) -> T:
            self.execution.attempt = execution.attempt
            return execute(execution)

        return noted

    def lasts(self, after: ExitStack | None) -> None:
        """Have the hooks end with the transactions of the caller, which these callbacks follow."""
        self._after = after

    def ended(self, outcome: Outcome) -> Outcome:
        """Note the outcome, and return it."""
        if isinstance(outcome, Executed):
            end, self.execution.error = outcome.rolled_back, outcome.error
            kept = end is None or end.payload is not None
            rolled_back: OutcomeName = "failed" if end and end.failed else "released"
            self.execution.outcome = "executed" if kept else rolled_back
        else:
            self.execution.outcome = _NAMES[type(outcome)]
        return outcome

    def raised(self, error: BaseException) -> None:
        """Note an error that there is instead of an outcome."""
        self.execution.error = error
        if self.execution.attempt is not None:
            self.execution.outcome = "failed"
        else:
            busy = isinstance(error, OperationInProgress)
            self.execution.outcome = "in_progress" if busy else "refused"

    def _transactions_ended(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.execution.outcome == "executed":
            self.raised(error)
        self._leave()

    def _leave(self) -> None:
        for hook, around in reversed(self._entered):
            with _harmless(hook):
                around.__exit__(None, None, None)


def observe(operation: Operation) -> Observation:
    """A context manager for the execution of the operation, which enters and leaves its hooks."""
    return Observation(operation, conf.around_execution)


_failed: Final[list[Hook]] = []


@contextmanager
def _harmless(hook: Hook) -> Iterator[None]:
    """Log the first error of a hook, and none that follows: it may fail around every request."""
    try:
        yield
    except Exception:
        if not any(each is hook for each in _failed):
            _failed.append(hook)
            logger.exception(
                "The hook %r of IDEMPOTENCY['AROUND_EXECUTION'] has failed. The execution is not "
                "affected. Later failures of this hook are not logged until this process is "
                "restarted.",
                hook,
            )
