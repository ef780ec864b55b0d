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
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import models, transaction

from ...errors import IllegalTransition
from .locks import assign_changes, lock_row, refresh_in_place, refuse_marked, table_row, write_alias
from .versions import Versioned, compare_and_swap


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
    method: Callable[[], Any] | None = None,
    field: str = "state",
) -> Moved | AlreadyThere:
    """Move an object from one state to another, and run an effect, once.

    The row is locked and read again, and moved by an UPDATE if it is in one of the sources. The
    effect runs after it, in the same transaction: both commit, or neither. A duplicate waits for
    the first one to end, and then does nothing. The state that counts is the row's, not the
    object's in memory: what was changed on the object and not saved is dropped.

    With ``method``, a state machine makes the move: instead of the UPDATE, the method runs, and the
    object is saved.

    Args:
        obj: a saved object. If it is versioned, its version is counted.
        source: the state to start from, or a list, tuple or set of several.
        target: the state to end in.
        effect: called with the object once it has been moved. What it does outside of the
            database is not rolled back: use
            :meth:`~idempotency_django.engine.context.ExecutionContext.step` for that.
        method: moves the object itself, as the methods of django-fsm-2 and viewflow do; instead of
            ``effect``.
        field: the name of the state's field.

    Raises:
        IllegalTransition: the row is in another state; nothing was done.
        ObjectDoesNotExist: the row is gone.
        ValueError: the target is among the sources, so that no duplicate could be told. Or the
            method has moved the object to another state than the target; nothing was done.
        TransactionManagementError: the effect has caught an error of the database, or marked the
            transaction for rollback; the row and the object are as before.
        Exception: an error of the effect or the method; the row and the object are as before.
    """
    sources = list(source) if isinstance(source, list | tuple | set | frozenset) else [source]
    if target in sources:
        raise ValueError(
            f"A transition to {target!r} cannot also start from {target!r}: a duplicate would "
            "repeat its effects. Remove that state from the sources."
        )
    using = write_alias(obj)
    with transaction.atomic(using=using):
        fresh = lock_row(obj, using)
        if fresh is None:
            raise missing(obj)
        state = getattr(fresh, field)
        if state != target and state not in sources:
            raise illegal(obj, state, target)
        refresh_in_place(obj, fresh, using)
        if state == target:
            return AlreadyThere(obj, state)
        if method is not None:
            return Moved(obj, target, _run(method, obj, using, field, target))
        if isinstance(obj, Versioned):
            compare_and_swap(obj, **{field: target})
        else:
            model = obj._meta.get_field(field).model
            table_row(model, obj, using).update(**{field: target})
            assign_changes(obj, using, {field: target})
        result = effect(obj) if effect else None
        refuse_marked(using, "The effect")
        return Moved(obj, getattr(obj, field), result)


def _run(method: Callable[[], Any], obj: models.Model, using: str, field: str, target: Any) -> Any:
    """Let a state machine's method move the locked object, and save the object."""
    result = method()
    refuse_marked(using, "The method")
    if getattr(obj, field) != target:
        raise ValueError(
            f"The method has moved the {obj._meta.verbose_name} {obj.pk} to "
            f"{getattr(obj, field)!r}, not to {target!r}, so duplicates could not be detected. "
            "Nothing was done. Pass the state that the method sets as the target."
        )
    obj.save()
    refuse_marked(using, "save()")
    return result


def illegal(obj: models.Model, state: Any, target: Any) -> IllegalTransition:
    """The error that names both states."""
    state, target = (getattr(each, "value", each) for each in (state, target))
    return IllegalTransition(
        f"The {obj._meta.verbose_name} {obj.pk} is in the state {state!r}, which has no "
        f"transition to {target!r}. Nothing was done."
    )


def missing(obj: models.Model) -> ObjectDoesNotExist:
    """The model's own error for a row that is gone."""
    error: type[ObjectDoesNotExist] = type(obj).DoesNotExist  # type: ignore[attr-defined]
    if obj._state.adding:
        return error(
            f"The {obj._meta.verbose_name} is not saved, so it has no row to update. Save it first."
        )
    return error(f"The {obj._meta.verbose_name} {obj.pk} does not exist.")
