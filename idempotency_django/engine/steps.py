"""Recovery points: which steps an attempt has reached, and what is stored about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from ..errors import ClaimLost, StepsChanged
from ..stores import Store
from ..stores.records import Claim, Step

LONGEST_NAME: Final = 100  # characters of a step's name
MOST: Final = 32_768  # steps of one operation, whose positions are stored in two bytes

_DONE: Final = (
    "The effects of both attempts stay. An operator must complete or release the operation."
)

_running: ContextVar[tuple[str, dict[Any, Any]]] = ContextVar("idempotency_step")

_encode = DjangoJSONEncoder(allow_nan=False).encode


class Steps:
    """The called and stored steps of one attempt.

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
        """Whether the stored steps of earlier attempts are loaded."""

    def load(self) -> None:
        """Ask the store what earlier attempts have stored, once."""
        if not self.loaded:
            self._stored = {step.position: step for step in self._store.steps(self._claim)}
            self.loaded = True

    @property
    def are_stored(self) -> bool:
        """Whether any step is known to be stored."""
        return bool(self._stored)

    def reach(self, name: str) -> tuple[int, Step | None]:
        """The position of the step that is called now, and what an earlier attempt stored for it.

        Raises:
            StepsChanged: another step is stored there, or this one elsewhere.
            ValueError: this attempt has completed a step with this name already, or is at it; or
                there are too many steps.
        """
        again = self._reached.get(name)  # after a failure that the handler dealt with itself
        if name in self._begun or again in self._stored:
            raise ValueError(
                f"This operation has two steps with the name {name!r}. Give each its own name."
            )
        position = len(self._reached) if again is None else again
        if position >= MOST:
            raise ValueError(
                f"An operation can have at most {MOST} steps, and {name!r} exceeds that. Do more "
                "in each step, or split the work into several operations."
            )
        stored = self._stored.get(position)
        if stored is not None and stored.name != name:
            raise StepsChanged(
                f"Step {position + 1} of this operation is {name!r} now, but attempt "
                f"{stored.attempt} stored {stored.name!r} there. A step was probably renamed, "
                f"moved, added or removed. {_DONE}"
            )
        if stored is None and any(step.name == name for step in self._stored.values()):
            raise StepsChanged(
                f"Step {position + 1} of this operation is {name!r} now, but an earlier attempt "
                "stored that step at another position. Steps were probably moved or removed. "
                f"{_DONE}"
            )
        self._reached[name] = position
        return position, stored

    @contextmanager
    def beginning(self, name: str) -> Iterator[None]:
        """Prevent another step of that name from beginning at the same time."""
        self._begun.add(name)
        try:
            yield
        finally:
            self._begun.discard(name)

    def save(self, position: int, name: str, result: Any) -> Step:
        """Store the result of a step, in the running transaction.

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
        """Treat a step as done, once it is committed."""
        # A new dict, because another thread may be looking through this one.
        self._stored = {**self._stored, step.position: step}

    def validate_all_reached(self) -> None:
        """Raise ``StepsChanged`` if this attempt never called a stored step."""
        self.load()
        left = [step.name for step in self._stored.values() if step.name not in self._reached]
        if left:
            steps = "the steps" if len(left) > 1 else "the step"
            raise StepsChanged(
                f"Attempt {self._claim.attempt} of this operation ended without {steps} "
                f"{', '.join(map(repr, left))} of an earlier attempt. The step was probably "
                f"removed, or a condition skipped it. {_DONE}"
            )


def text_of(error: BaseException) -> str:
    """The text of an error, also if its own ``__str__()`` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # the error is reported anyway
        return f"str() of the error failed ({type(failure).__name__})"


def describe_error(error: BaseException) -> str:
    """The class of an error and its text, for records and logs."""
    return f"{type(error).__name__}: {text_of(error)}"


def as_json(name: str, result: Any) -> str:
    """The result of the function or step ``name`` as JSON, to be stored.

    Raises:
        TypeError: it is not JSON.
    """
    try:
        return _encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name!r} returned a value that is not JSON, so it cannot be stored: {error}. Return "
            "what DjangoJSONEncoder can write, for example an id instead of an object."
        ) from error


def validate_step_name(name: object) -> None:
    """Raise ``ValueError`` if a step cannot have this name."""
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME):
        raise ValueError(
            f"{name!r} is not a valid name of a step: it must have 1-{LONGEST_NAME} characters."
        )


def validate_not_nested(name: str) -> None:
    """Raise ``ImproperlyConfigured`` if another step is running: this one would be part of it."""
    if outer := current_step():
        raise ImproperlyConfigured(
            f"The step {name!r} was started within the step {outer!r} and would commit with it. "
            "Start it after that step."
        )


def current_step() -> str:
    """The name of the step that is running here; empty: none is."""
    return current_run()[0]


def current_run() -> tuple[str, dict[Any, Any] | None]:
    """The name of the step that is running here, and what was noted since it began."""
    return _running.get(("", None))


@contextmanager
def running(name: str) -> Iterator[None]:
    """In the block, the step of that name is running."""
    token = _running.set((name, {}))
    try:
        yield
    finally:
        _running.reset(token)
