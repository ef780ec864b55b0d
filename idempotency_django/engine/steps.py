"""Recovery points: the steps of an attempt, which are found by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from ..errors import ClaimLost, StepsChanged
from ..stores import Store
from ..stores.records import Claim, Step
from .leases import Lease

LONGEST_NAME: Final = 100  # characters of a step's name

_running: ContextVar[str] = ContextVar("idempotency_step", default="")

_encode = DjangoJSONEncoder(allow_nan=False).encode


def current_step() -> str:
    """The name of the step that is running here, or an empty text."""
    return _running.get()


class Steps:
    """The called and stored steps of one attempt.

    Args:
        store: where they are stored.
        claim: the attempt's.
        lease: the claim's.
    """

    def __init__(self, store: Store, claim: Claim, lease: Lease) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self._called: dict[str, object] = {}
        self._results: dict[str, str] = {}
        self._are_loaded = claim.attempt == 1

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """In the block, the step is running. If it fails, it may be called again.

        Raises:
            ValueError: it cannot have this name, or another step of the attempt has it.
            ImproperlyConfigured: it would be part of another step.
        """
        if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME):
            raise ValueError(
                f"{name!r} is not a valid name of a step: it must have 1-{LONGEST_NAME} characters."
            )
        if outer := current_step():
            raise ImproperlyConfigured(
                f"The step {name!r} was started within the step {outer!r} and would commit with "
                "it. Start it after that step."
            )
        call = object()
        if self._called.setdefault(name, call) is not call:  # atomic: another thread may call it
            raise ValueError(
                f"This operation has two steps with the name {name!r}. Give each its own name."
            )
        token = _running.set(name)
        try:
            yield
        except BaseException:
            if name not in self._results:
                del self._called[name]
            raise
        finally:
            _running.reset(token)

    def result_of(self, name: str) -> str | None:
        """What an earlier attempt stored for the step, if it stored anything.

        Raises:
            ClaimLost: the operation was taken over, so no other step may begin.
        """
        self._load()
        result = self._results.get(name)
        if result is None:
            self._lease.ensure()
        return result

    def commit(self, name: str, function: Callable[[], Any]) -> str:
        """Call the function and store its result, in one transaction; the result as JSON.

        Raises:
            TypeError: the result is not JSON.
            ClaimLost: the operation was taken over.
        """
        committed: dict[str, str] = {}
        note = partial(self._results.update, committed)
        with self._store.durable(f"The step {name!r}"):
            # Before the function's own hooks: one of them may raise after the commit and end them
            # all.
            self._store.on_commit(note)
            result = as_json(name, function())
            step = Step(name=name, attempt=self._claim.attempt, result=result)
            if not self._store.save_step(self._claim, step):
                raise ClaimLost
            committed[name] = result
        note()  # a test's transaction runs no hooks
        return result

    def validate_all_called(self) -> None:
        """Raise ``StepsChanged`` if this attempt never called a stored step.

        It is called before the operation is completed: what that step did would be forgotten.
        """
        self._load()
        left = [name for name in self._results if name not in self._called]
        if left:
            steps = "the steps" if len(left) > 1 else "the step"
            raise StepsChanged(
                f"Attempt {self._claim.attempt} of this operation ended without {steps} "
                f"{', '.join(map(repr, left))} of an earlier attempt. The step was probably "
                "renamed or removed, or a condition skipped it. The effects of both attempts "
                "stay. Restore the step, and retry with the same key."
            )

    def _load(self) -> None:
        """Ask the store what earlier attempts have stored, once."""
        if not self._are_loaded:
            self._results |= {step.name: step.result for step in self._store.steps(self._claim)}
            self._are_loaded = True


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
