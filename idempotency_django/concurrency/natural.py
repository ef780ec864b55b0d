"""Natural keys: the row itself says whether something was done.

::

    payment, created = ensure(Payment, order=order, defaults={"amount": 500})

    @once_per("order_id", model=Payment)
    def pay(order_id, amount):
        return Payment.objects.create(order_id=order_id, amount=amount)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import UniqueConstraint

ModelT = TypeVar("ModelT", bound=models.Model)


def ensure(
    model: type[ModelT],
    /,
    defaults: Mapping[str, Any] | None = None,
    using: str | None = None,
    **lookup: Any,
) -> tuple[ModelT, bool]:
    """Create a row unless it is there: ``get_or_create()`` for rows that are new most of the time.

    It inserts first, by ``save()``, and looks only if the database refuses: one statement for a
    new row. Within a transaction, the INSERT gets a savepoint, so that the transaction goes on.

    Args:
        model: the model. A unique constraint must be over exactly the fields of the lookup.
        defaults: values of other fields for a new row. What is callable is called.
        using: the database; by default the one that the model is written to.
        lookup: the fields that identify the row, and their values.

    Returns:
        The object, and whether it was created.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly these fields.
        ValueError: a value is ``None``, which no constraint compares.
        IntegrityError: another constraint refused the row.
    """
    refuse_unfit(model, lookup)
    alias = using or router.db_for_write(model)
    given = {
        name: value() if callable(value) else value for name, value in (defaults or {}).items()
    }
    obj = model(**given | lookup)
    is_open = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if is_open else nullcontext():
            # All of it: Django would update a parent's row that is there already.
            obj.save(force_insert=(models.Model,) if model._meta.parents else True, using=alias)
    except IntegrityError:
        # Whichever constraint it was: if the row is there, it is as it was asked for.
        found = row_of(model, alias, lookup)
        if found is None:
            raise
        return found, False
    return obj, True


def row_of(model: type[ModelT], using: str, lookup: Mapping[str, Any]) -> ModelT | None:
    """The row with these values, also where a transaction's snapshot is older than the row."""
    rows = model._base_manager.using(using).filter(**lookup)
    row = rows.first()
    connection = connections[using]
    if row is not None or not connection.in_atomic_block:
        return row
    return rows.select_for_update().first() if connection.vendor == "mysql" else None


def refuse_unfit(model: type[models.Model], lookup: Mapping[str, Any]) -> None:
    """Refuse a lookup that no constraint makes unique.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly these fields.
        ValueError: a value is ``None``, which no constraint compares.
    """
    compares_nulls = compared(model, lookup)
    unknown = [name for name, value in lookup.items() if value is None]
    if unknown and not compares_nulls:
        raise ValueError(
            f"{', '.join(unknown)} is None. A unique constraint takes no two NULLs for equal, so "
            "there could be many such rows. Give the constraint nulls_distinct=False where the "
            "database can do that (PostgreSQL), or do not allow NULL."
        )


def compared(model: type[models.Model], names: Any) -> bool:
    """Whether the unique constraint over these fields takes two NULLs for equal.

    Raises:
        ImproperlyConfigured: there is no such constraint.
    """
    try:
        wanted = {model._meta.get_field(name).name for name in names}
    except FieldDoesNotExist as error:
        raise ImproperlyConfigured(
            f"{error}. A natural key is made of the model's own fields, without lookups such as "
            "name__iexact."
        ) from None
    found = [nulls for fields, nulls in _unique_sets(model) if fields == wanted]
    if not found:
        listed = ", ".join(repr(name) for name in names)
        raise ImproperlyConfigured(
            f"{model._meta.label} has no unique constraint over exactly {listed}, so two rows "
            f"could be made at the same time. Add UniqueConstraint(fields=[{listed}], name=…) to "
            "its Meta.constraints, without a condition, and not deferrable."
        )
    return any(found)


def _unique_sets(model: type[models.Model]) -> Iterator[tuple[set[str], bool]]:
    """The fields of each unique constraint that is checked at once and for all rows."""
    for field in model._meta.concrete_fields:
        if field.unique:
            yield {field.name}, False
    for options in [model._meta, *(parent._meta for parent in model._meta.all_parents)]:
        for names in options.unique_together:
            yield set(names), False
        for constraint in options.constraints:
            if not isinstance(constraint, UniqueConstraint) or not constraint.fields:
                continue
            if constraint.condition is None and constraint.deferrable is None:
                yield set(constraint.fields), constraint.nulls_distinct is False
