"""Events that arrive many at a time."""

from __future__ import annotations

from ..engine.batch import run_many
from .handling import Handling, known_duplicates
from .outcomes import Failed, Outcome


def together(handlings: list[Handling]) -> list[Outcome]:
    """Handle events in as few transactions as possible; their outcomes."""
    if not handlings:
        return []
    known = known_duplicates(handlings)
    rest = [each for each, duplicate in zip(handlings, known, strict=True) if duplicate is None]
    ended = run_many(handlings[0].plan.store, [each.item for each in rest])
    outcomes = [handling.outcome(each) for handling, each in zip(rest, ended, strict=True)]
    if (seen := handlings[0].seen) is not None:
        pairs = zip(rest, outcomes, strict=True)
        seen.remember([each.name for each, outcome in pairs if not isinstance(outcome, Failed)])
    others = iter(outcomes)
    return [next(others) if duplicate is None else duplicate for duplicate in known]


def alone(handlings: list[Handling]) -> list[Outcome]:
    """Handle one event after the other, each claimed visibly; their outcomes."""
    outcomes: list[Outcome] = []
    for handling in handlings:
        try:
            outcomes.append(handling.run(visibly=True))
        except Exception as error:  # noqa: BLE001  # it is this event's, whatever it is
            outcomes.append(Failed(error))
    return outcomes
