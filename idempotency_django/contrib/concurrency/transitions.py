"""State transitions: of many duplicates one moves the row and runs the effect.

::

    def ship(order): ...

    match transition(order, "paid", "shipped", effect=ship):
        case Moved(result=parcel): ...
        case AlreadyThere(): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import models, transaction

from .errors import IllegalTransition
from .locks import lock, on_rollback, refuse_marked, write_alias


@dataclass(frozen=True, slots=True)
class Moved:
    """The object was moved by this call.

    Attributes:
        obj: the object, in its new state.
        state: the new state.
        result: what the effect returned.
    """

    obj: models.Model
    state: Any
    result: Any = None


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The object was moved before, by another process or an earlier call; nothing was done.

    Attributes:
        obj: the object, in that state.
        state: the state.
    """

    obj: models.Model
    state: Any


def transition(
    obj: models.Model,
    source: Any,
    target: Any,
    *,
    effect: Callable[[Any], Any] | None = None,
    field: str = "state",
) -> Moved | AlreadyThere:
    """Move an object from one state to another, and run an effect, once.

    The row is locked and read again. If it is in one of the sources, ``save()`` writes the new
    state. The effect runs after it, in the same transaction: both commit, or neither. A duplicate
    waits for the first one to end, and then does nothing. The state that counts is the row's, not
    the object's in memory: what was changed on the object and not saved is dropped.

    Args:
        obj: a saved object. If it is versioned, its version is counted.
        source: the state to start from, or a list, tuple or set of several.
        target: the state to end in.
        effect: called with the object once it has been moved. What it does outside of the
            database is not rolled back: use
            :meth:`~idempotency_django.engine.context.ExecutionContext.step` for that.
        field: the name of the state's field.

    Raises:
        IllegalTransition: the row is in another state; nothing was done.
        ObjectDoesNotExist: the row is gone.
        ValueError: the target is among the sources, so that no duplicate could be told.
        TransactionManagementError: the effect has caught an error of the database, or marked the
            transaction for rollback; the row is as before, and so is the object's state.
        Exception: an error of the effect; likewise. What else the effect has set on the object
            stays: load it again.
    """
    sources = list(source) if isinstance(source, list | tuple | set | frozenset) else [source]
    if target in sources:
        raise ValueError(
            f"A transition to {target!r} cannot also start from {target!r}: a duplicate would "
            "repeat its effects. Remove that state from the sources."
        )
    using = write_alias(obj)
    with transaction.atomic(using=using):
        lock(obj, using)
        state = getattr(obj, field)
        if state == target:
            return AlreadyThere(obj, state)
        if state not in sources:
            raise IllegalTransition(
                f"The {obj._meta.verbose_name} {obj.pk} is in the state {str(state)!r}, which has "
                f"no transition to {str(target)!r}. Nothing was done."
            )
        on_rollback(using, partial(setattr, obj, field, state))
        setattr(obj, field, target)
        obj.save(update_fields=[field], using=using)
        result = effect(obj) if effect else None
        refuse_marked(using, "The effect")
        return Moved(obj, getattr(obj, field), result)
