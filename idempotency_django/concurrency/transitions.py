"""State transitions: of many duplicates one moves the row and runs the effect.

::

    def ship(order): ...

    match transition(order, "paid", "shipped", effect=ship):
        case Moved(result=parcel): ...
        case AlreadyThere(): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import models, transaction
from django.db.models import F, Q

from ..errors import IllegalTransition
from .locks import lock_root_table, lock_row, refresh_in_place, table_row, write_alias
from .rollbacks import refuse_marked
from .versions import Versioned, version_field


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
    """The object was moved before, by somebody else or by an earlier call; nothing was done.

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

    One UPDATE on condition of the state comes first and locks the row. The effect runs after it, in
    the same transaction: both commit, or neither. A duplicate waits for the first one to end, and
    then does nothing. The state that counts is the row's, not the object's in memory.

    The object follows its row, before the effect runs: what was changed on the object and not saved
    is dropped.

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
            transaction for rollback; the row and the object are as before.
        Exception: whatever the effect raises; the row and the object are as before.
    """
    sources = list(source) if isinstance(source, list | tuple | set | frozenset) else [source]
    if target in sources:
        raise ValueError(
            f"A transition to {target!r} cannot start from there: a duplicate would run the effect "
            "again. Remove it from the sources."
        )
    using = write_alias(obj)
    model = obj._meta.get_field(field).model
    tables: dict[type[models.Model], dict[str, Any]] = {model: {field: target}}
    if isinstance(obj, Versioned):
        version = version_field(type(obj))
        tables.setdefault(version.model, {})[version.attname] = F(version.attname) + 1
    with transaction.atomic(using=using):
        lock_root_table(obj, using)
        state = table_row(model, obj, using).filter(_among(field, sources))
        moved = state.update(**tables.pop(model))
        for other, changes in tables.items() if moved else ():
            table_row(other, obj, using).update(**changes)
        fresh = _lock_row(obj, using)
        state = getattr(fresh, field)
        if state != target:
            raise illegal(obj, state, target)
        refresh_in_place(obj, fresh, using)
        if not moved:
            return AlreadyThere(obj, state)
        result = effect(obj) if effect else None
        refuse_marked(using, "The effect")
        return Moved(obj, state, result)


def _among(field: str, values: list[Any]) -> Q:
    """The condition that a field has one of the values; SQL's ``IN`` finds no NULL."""
    found = Q(**{f"{field}__in": [value for value in values if value is not None]})
    return found | Q(**{f"{field}__isnull": True}) if None in values else found


def _lock_row(obj: models.Model, using: str) -> models.Model:
    """The object as its row is; locked, because an unlocked look may be a snapshot's."""
    fresh = lock_row(obj, using)
    if fresh is None:
        raise missing(obj)
    return fresh


@dataclass(frozen=True, slots=True)
class Machine:
    """One method of a state machine of another library, as its adapter describes it.

    Attributes:
        state: reads the state.
        sources: the states that the method is declared for by name.
        targets: the states that it leads to, as far as they are declared.
        starts_from: whether the method is declared for a state.
    """

    state: Callable[[], Any]
    sources: Iterable[Any]
    targets: Iterable[Any]
    starts_from: Callable[[Any], bool]


def run_locked(
    obj: models.Model, machine: Machine, method: Callable[[], Any]
) -> Moved | AlreadyThere:
    """Run a method of a state machine on the locked row, and save the object."""
    using = write_alias(obj)
    with transaction.atomic(using=using):
        refresh_in_place(obj, _lock_row(obj, using), using)
        state = machine.state()
        if state in machine.targets and state not in machine.sources:
            return AlreadyThere(obj, state)
        if not machine.starts_from(state):
            raise illegal(obj, state, *machine.targets)
        result = method()
        refuse_marked(using, "The method")
        obj.save()
        refuse_marked(using, "save()")
        return Moved(obj, machine.state(), result)


def illegal(obj: models.Model, state: Any, *targets: Any) -> IllegalTransition:
    """The error that names both states."""
    wanted = " or ".join(repr(getattr(target, "value", target)) for target in targets)
    return IllegalTransition(
        f"The {obj._meta.verbose_name} {obj.pk} is in the state "
        f"{getattr(state, 'value', state)!r}, from which it cannot become "
        f"{wanted or 'anything else'}. Nothing was done."
    )


def missing(obj: models.Model) -> ObjectDoesNotExist:
    """The model's own error for a row that is gone."""
    error: type[ObjectDoesNotExist] = type(obj).DoesNotExist  # type: ignore[attr-defined]
    if obj._state.adding:
        return error(f"The {obj._meta.verbose_name} is not saved, so no row can be moved. Save it.")
    return error(f"The {obj._meta.verbose_name} {obj.pk} does not exist.")
