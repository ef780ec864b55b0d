"""The state machine of every adapter: plan an operation, execute it once, match its outcome.

Nothing here knows HTTP or a concrete store. An adapter makes a :class:`Plan`, gives it to
:func:`run` with a function that executes it, and matches the :data:`Outcome`.
"""

from .batch import Item, run_many
from .context import ExecutionContext, current_execution, current_step
from .functions import aidempotent_call, idempotent_call, json_result, run_plan
from .outcomes import (
    Admit,
    Executed,
    Expired,
    Held,
    InProgress,
    Mismatched,
    Outcome,
    Replayed,
    Result,
    decide,
    describe_error,
    refusal,
    reraise,
)
from .planning import Plan, choose_mode, make_plan, plan_call
from .running import arun, replay, run

__all__ = [
    "Admit",
    "Executed",
    "ExecutionContext",
    "Expired",
    "Held",
    "InProgress",
    "Item",
    "Mismatched",
    "Outcome",
    "Plan",
    "Replayed",
    "Result",
    "aidempotent_call",
    "arun",
    "choose_mode",
    "current_execution",
    "current_step",
    "decide",
    "describe_error",
    "idempotent_call",
    "json_result",
    "make_plan",
    "plan_call",
    "refusal",
    "replay",
    "reraise",
    "run",
    "run_many",
    "run_plan",
]
