"""Recovery points: which steps an attempt has reached, and what is stored about them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from ..errors import ClaimLost, StepFailed, StepsChanged, StoreUnavailable
from ..stores import Store
from ..stores.records import Claim, Step

LONGEST_NAME: Final = 100  # characters of a step's name
LONGEST_ERROR: Final = 4096  # characters of an error's text, and of each of its attributes
MOST: Final = 32_768  # steps of one operation, whose positions are stored in two bytes

_DONE: Final = (
    "The effects of both attempts stay. An operator must complete or release the operation."
)

_running: ContextVar[tuple[str, dict[Any, Any]]] = ContextVar("idempotency_step")

encode_json = DjangoJSONEncoder(allow_nan=False).encode
"""Encode a value as JSON, to be stored; the errors of :func:`as_json` also name the source of the
value.
"""


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
        self._failed: dict[str, Exception] = {}
        self._settling = threading.Lock()
        self.expected: tuple[type[Exception], ...] = ()
        """The error classes that a failed step can raise again."""
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
        done = self._stored.get(again) if again is not None else None
        if done and done.failure and again is not None:
            return again, done
        if name in self._begun or done:
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
        """Prevent another step of that name from beginning at the same time; note if it fails."""
        self._begun.add(name)
        self._failed.pop(name, None)
        try:
            yield
        except asyncio.CancelledError:
            self._failed[name] = TimeoutError("It was cancelled.")  # as its handler may see it
            raise
        except Exception as error:
            self._failed[name] = error
            raise
        finally:
            self._begun.discard(name)

    def outcome(self, stored: Step) -> Any:
        """The result of a stored step; if it failed, its error is raised again."""
        if stored.failure:
            raise load_error(stored, self.expected)
        return json.loads(stored.result)

    @property
    def failed(self) -> frozenset[str]:
        """The steps that have failed in this attempt, and are not stored as such."""
        return frozenset(self._failed)

    def keep(self, failed: frozenset[str]) -> None:
        """Store the failures that the handler has caught, before anything follows them.

        What follows depends on them. If such a step succeeded in a later attempt, the handler would
        take the other branch there, and both branches would have effects.

        Args:
            failed: the steps that had failed when what is to follow was called for. Those of them
                that are being called again are left out.

        Raises:
            StoreUnavailable: as a step did of which it is unknown whether it was committed: nothing
                may follow that. Or the failures cannot be stored.
            ClaimLost: the operation was taken over.
            ImproperlyConfigured: a transaction surrounds what is to follow.
        """
        if not failed:
            return
        with self._settling:
            again = self._begun
            caught = {n: e for n, e in self._failed.items() if n in failed and n not in again}
            for error in caught.values():
                if isinstance(error, (StoreUnavailable, ClaimLost)):
                    raise error
            if not caught:
                return
            failures = [
                Step(
                    position=self._reached[name],
                    name=name,
                    attempt=self._claim.attempt,
                    result="",
                    failure=dump_error(error),
                )
                for name, error in caught.items()
            ]
            with self._store.durable(f"The failure of the step {failures[0].name!r}"):
                for step in failures:
                    if not self._store.save_step(self._claim, step):
                        raise ClaimLost
            for step in failures:
                self.note(step)
                del self._failed[step.name]

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
            raise StepsChanged(
                f"Attempt {self._claim.attempt} of this operation ended without {_named(left)} of "
                "an earlier attempt. The step was probably removed, or a condition skipped it. "
                f"{_DONE}"
            )


def dump_error(error: Exception) -> str:
    """The error as JSON: its classes, its text, and those of its arguments and attributes that are.

    What is longer than ``LONGEST_ERROR`` is left out. Arguments belong together: if one of them is
    not JSON, the text replaces all of them.
    """
    text = text_of(error)[:LONGEST_ERROR]
    attributes = {n: v for n, v in vars(error).items() if not n.startswith("__") and _is_kept(v)}
    return encode_json(
        {
            "classes": [_path(cls) for cls in type(error).__mro__ if issubclass(cls, Exception)],
            "text": text,
            "args": list(error.args) if _is_kept(error.args) else [text],
            "attributes": attributes,
        }
    )


def load_error(step: Step, expected: Iterable[type[Exception]]) -> Exception:
    """The error that a step failed with, to be raised again.

    Args:
        step: one that has failed.
        expected: classes that may be raised; the closest one is, else ``StepFailed``.
    """
    stored = json.loads(step.failure)
    known = {_path(cls): cls for cls in expected}
    closest = next((known[path] for path in stored["classes"] if path in known), None)
    error = None if closest is None else _made(closest, stored)
    if error is None:
        name = stored["classes"][0].rpartition(".")[2]
        return StepFailed(step.name, step.attempt, name, stored["text"])
    error.add_note(
        f"The step {step.name!r} failed with this error in attempt {step.attempt}, which "
        "continued without the step. So the step is not called again."
    )
    return error


def _made(cls: type[Exception], stored: dict[str, Any]) -> Exception | None:
    try:
        # Not by its __init__, whose arguments may be others than the error's.
        error = cls.__new__(cls, *stored["args"])
        error.args = tuple(stored["args"])
        vars(error).update(stored["attributes"])
    except Exception:  # noqa: BLE001  # a class of its own kind
        return None
    return error


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def text_of(error: BaseException) -> str:
    """The text of an error, also if its own ``__str__()`` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # the error is reported anyway
        return f"str() of the error failed ({type(failure).__name__})"


def named(error: BaseException) -> str:
    """The class of an error and its text, for records and logs."""
    return f"{type(error).__name__}: {text_of(error)}"


def _is_kept(value: object) -> bool:
    """Whether a value is JSON, and not a whole response, as the errors of SDKs carry it."""
    try:
        return len(encode_json(value)) <= LONGEST_ERROR
    except (TypeError, ValueError, RecursionError):
        return False


def as_json(name: str, result: Any) -> str:
    """The result of the function or step ``name`` as JSON, to be stored.

    Raises:
        TypeError: it is not JSON.
    """
    try:
        return encode_json(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise no_json(name, error) from error


def no_json(name: str, error: Exception) -> TypeError:
    """The error of a function or step that returned what is not JSON."""
    return TypeError(
        f"{name!r} returned a value that is not JSON, so it cannot be stored: {error}. Return what "
        "DjangoJSONEncoder can write, for example an id instead of an object."
    )


def _named(names: list[str]) -> str:
    return f"the step{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


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
