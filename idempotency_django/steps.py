"""Recovery points: which steps an attempt has reached, and what is stored of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .errors import ClaimLost, StepsChanged
from .records import Claim, Step
from .stores import Store

LONGEST_NAME: Final = 100  # characters of a step's name


class Steps:
    """The steps of one attempt: those that it has called, and those that are stored.

    Args:
        store: where they are stored.
        claim: the attempt's.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._stored: dict[int, Step] = {}
        self._reached: dict[str, int] = {}
        self._begun: set[str] = set()
        self.loaded = claim.attempt == 1
        """Whether what earlier attempts have stored is known."""

    def load(self) -> None:
        """Ask the store what earlier attempts have stored, once."""
        if not self.loaded:
            self._stored = {step.position: step for step in self._store.steps(self._claim)}
            self.loaded = True

    def reach(self, name: str) -> tuple[int, Step | None]:
        """The position of a step that is called now, and what an earlier attempt stored of it.

        Raises:
            StepsChanged: another step is stored there, or this one elsewhere.
            ValueError: this attempt has stored a step with this name already, or is at it.
        """
        again = self._reached.get(name)  # after a failure that the handler dealt with itself
        if name in self._begun or (again is not None and again in self._stored):
            raise ValueError(
                f"This operation has two steps that are called {name!r}. Give each its own name."
            )
        position = len(self._reached) if again is None else again
        stored = self._stored.get(position)
        if stored is not None and stored.name != name:
            raise StepsChanged(
                f"Step {position + 1} of this operation is {name!r} now, but attempt "
                f"{stored.attempt} stored {stored.name!r} there. Was a step renamed, moved, added "
                "or removed? What it did stays done; an operator must settle the operation."
            )
        if stored is None and any(step.name == name for step in self._stored.values()):
            raise StepsChanged(
                f"Step {position + 1} of this operation is {name!r} now, which an earlier attempt "
                "stored at another place. Were steps moved, or one before it removed? What they "
                "did stays done; an operator must settle the operation."
            )
        self._reached[name] = position
        return position, stored

    @contextmanager
    def beginning(self, name: str) -> Iterator[None]:
        """Keep another step of that name from being begun at the same time."""
        self._begun.add(name)
        try:
            yield
        finally:
            self._begun.discard(name)

    def save(self, position: int, name: str, result: Any) -> Step:
        """Store what a step came to, in the running transaction.

        Raises:
            TypeError: it is not JSON.
            ClaimLost: the operation was taken over.
        """
        attempt = self._claim.attempt
        step = Step(position=position, name=name, attempt=attempt, result=as_json(name, result))
        if not self._store.save_step(self._claim, step):
            raise ClaimLost
        return step

    def note(self, step: Step) -> None:
        """Take a step for done, once that is committed."""
        # A new dict, because another thread may be looking through this one.
        self._stored = {**self._stored, step.position: step}

    def refuse_unreached(self) -> None:
        """Raise ``StepsChanged`` where a stored step was never called by this attempt."""
        self.load()
        left = [step.name for step in self._stored.values() if step.name not in self._reached]
        if left:
            raise StepsChanged(
                f"Attempt {self._claim.attempt} of this operation ended without {_named(left)}, "
                "which an earlier attempt had done. Was a step removed, or is it skipped by a "
                "condition?"
            )


_encode = json.JSONEncoder(allow_nan=False).encode


def as_json(name: str, result: Any) -> str:
    """The result of what is called ``name``, to be stored.

    Raises:
        TypeError: it is not JSON.
    """
    try:
        return _encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name!r} returned what is not JSON, so it cannot be stored: {error}. Return what is "
            "needed as dicts, lists, texts, numbers, booleans and None: an id, not an object."
        ) from error


def _named(names: list[str]) -> str:
    return f"the step{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
