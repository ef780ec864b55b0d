"""Locks rows and reads them again; objects in memory follow their rows, also in a rollback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, models, router, transaction
from django.db.models import F

ModelT = TypeVar("ModelT", bound=models.Model)


def in_transaction(using: str) -> AbstractContextManager[None]:
    """The transaction that is open, or a new one."""
    is_open = connections[using].in_atomic_block
    return nullcontext() if is_open else transaction.atomic(using=using)


def write_alias(obj: models.Model) -> str:
    """The database that the object is written to."""
    return router.db_for_write(type(obj), instance=obj)


def table_row(model: type[models.Model], obj: models.Model, using: str) -> models.QuerySet[Any]:
    """The object's row in the table of a model, which may be a parent in multi-table inheritance.

    A condition on a column must be in the UPDATE of the table that has it. Of an inherited field,
    Django makes a SELECT with the condition and an UPDATE without it, and in between another
    writer passes the same condition.
    """
    return model._base_manager.using(using).filter(pk=getattr(obj, model._meta.pk.attname))


def has_primary_key(obj: models.Model) -> bool:
    """Whether the object has a primary key, in the table of any of its models."""
    metas = [obj._meta, *(parent._meta for parent in obj._meta.all_parents)]
    return any(getattr(obj, meta.pk.attname) is not None for meta in metas)


def lock_root_table(obj: models.Model, using: str) -> None:
    """Lock the row that ``save()`` writes first, if the object has rows in several tables.

    Writers who lock several rows wait for each other there, and so not in a circle. The database
    must be in a transaction.
    """
    model: Any = obj._meta.concrete_model
    if not model._meta.parents or not connections[using].features.has_select_for_update:
        return
    while model._meta.parents:
        model = next(iter(model._meta.parents))
    table_row(model, obj, using).select_for_update().values_list("pk").first()


def lock_row(obj: ModelT, using: str) -> ModelT | None:
    """The object as its row is now, locked until the transaction's end; ``None``: it is gone.

    Where rows have no locks (SQLite), an UPDATE that changes nothing takes the database's.
    """
    rows = type(obj)._base_manager.using(using).filter(pk=obj.pk)
    if not connections[using].features.has_select_for_update:
        key = obj._meta.pk.attname
        rows.update(**{key: F(key)})
        return rows.first()
    lock_root_table(obj, using)
    return rows.select_for_update().first()


def refresh_in_place(obj: ModelT, fresh: ModelT, using: str) -> None:
    """Give the object the values of its row; after a rollback it is again what it was before."""
    values = {field.attname: fresh.__dict__[field.attname] for field in obj._meta.concrete_fields}
    before, related = dict(obj.__dict__), dict(obj._state.fields_cache)

    def go_back() -> None:
        obj.__dict__.clear()
        obj.__dict__.update(before)
        obj._state.fields_cache.clear()
        obj._state.fields_cache.update(related)

    on_rollback(using, go_back)  # also if it is current: later code may change it
    if values.items() <= before.items():
        return  # and the related objects that were loaded with it stay
    # Not by setattr(): a field may protect itself from being set.
    obj.__dict__.update(values)
    obj._state = fresh._state  # with the related objects, which may be others now


def assign_changes(obj: models.Model, using: str, changes: Mapping[str, Any]) -> None:
    """Give the object the values that its row was given; its old ones again after a rollback."""
    for name, value in changes.items():
        field: Any = obj._meta.get_field(name)
        on_rollback(using, _restorer(obj, field))
        if hasattr(value, "resolve_expression"):
            obj.__dict__.pop(field.attname, None)  # deferred: it is loaded when it is read
            if field.is_relation:
                obj._state.fields_cache.pop(field.cache_name, None)
        elif field.is_relation:
            setattr(obj, name, value)
        else:  # not by setattr(): a field may protect itself from being set
            obj.__dict__[field.attname] = value


def _restorer(obj: models.Model, field: Any) -> Callable[[], None]:
    """Make what gives the object a field as it is now, with the related object if loaded."""
    places = [(obj.__dict__, field.attname)]
    if field.is_relation:
        places.append((obj._state.fields_cache, field.cache_name))
    before = [(place, name, name in place, place.get(name)) for place, name in places]

    def restore() -> None:
        for place, name, was_there, value in before:
            if was_there:
                place[name] = value
            else:
                place.pop(name, None)

    return restore


# Rollbacks.


class _Undo:
    """A hook for ``on_commit()`` that undoes something if it is dropped without being called.

    Django has no hook for a rollback. But it drops the hooks of a transaction or savepoint that is
    rolled back, the newest first, and nothing else holds them: their end is the rollback. Where
    another hook raises after the commit, Django drops those after it, too. Then something is
    undone that need not be: the next write is refused as stale, and none is lost.
    """

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def __call__(self) -> None:
        self._undo = None

    def __del__(self) -> None:
        if self._undo is not None:
            self._undo()


def on_rollback(using: str, undo: Callable[[], object]) -> None:
    """Call ``undo`` if the transaction or the savepoint that is open now is rolled back."""
    if connections[using].in_atomic_block:
        transaction.on_commit(_Undo(undo), using=using)


def refuse_marked(using: str | None, what: str) -> None:
    """Refuse to report a success if the transaction that is open is going to be rolled back.

    Django rolls back a marked transaction without a word.

    Args:
        using: the database; ``None``: the default one.
        what: was executed in the transaction, as the first word of the error.

    Raises:
        TransactionManagementError: the transaction is marked for rollback.
    """
    connection = connections[using or DEFAULT_DB_ALIAS]
    if connection.in_atomic_block and connection.needs_rollback:
        raise transaction.TransactionManagementError(
            f"{what} ended without an error, but its transaction is marked for rollback, so "
            "nothing was changed. If it catches a database error, wrap the failing statements in "
            "their own atomic() and catch the error outside of that. If it calls "
            "set_rollback(True), raise an exception instead."
        )
