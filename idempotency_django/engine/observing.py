"""The context managers around every execution, which ``IDEMPOTENCY["AROUND_EXECUTION"]`` lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from ..conf import conf
from ..stores.records import Operation
from .outcomes import Executed, Expired, Held, InProgress, Mismatched, Outcome, Replayed

_NAMES: Final[dict[type[Outcome], str]] = {
    Replayed: "replayed",
    InProgress: "in_progress",
    Held: "held",
    Expired: "expired",
    Mismatched: "mismatched",
}


@dataclass(slots=True)
class ObservedExecution:
    """An execution, as the context managers around it see it.

    Attributes:
        operation: what was asked for. It has no body, but the key: of which there are as many as
            requests, so it is no label of a metric.
        outcome: how it ended. ``"executed"``: a response is stored. ``"released"``: rolled back for
            a response that is not kept. ``"failed"``: an error or a 5xx; it has this value until
            the end. ``"replayed"``, ``"in_progress"``, ``"held"``, ``"expired"``,
            ``"mismatched"``: it was not executed now.
    """

    operation: Operation
    outcome: str = "failed"

    def end_with(self, outcome: Outcome) -> None:
        """Note the outcome."""
        if isinstance(outcome, Executed):
            end = outcome.rolled_back
            if end is None or outcome.payload is not None:
                self.outcome = "executed"
            elif not end.failed:
                self.outcome = "released"
        else:
            self.outcome = _NAMES[type(outcome)]


@contextmanager
def observed(operation: Operation) -> Iterator[ObservedExecution]:
    """The block is the execution of the operation, from before its claim to after its commit."""
    execution = ObservedExecution(operation)
    raised: BaseException | None = None
    with ExitStack() as around:
        for manager in conf.around_execution:
            around.enter_context(manager(execution))
        try:
            yield execution
        except BaseException as error:
            raised = error
            raise
    if raised is not None:  # a manager has swallowed it, but there is no response without it
        raise raised
