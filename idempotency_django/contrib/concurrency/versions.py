"""Optimistic locking: a write that would overwrite another change is refused, with no extra query.

::

    class Order(Versioned, models.Model):
        version = VersionField()

    order.save()                             # UPDATE … WHERE id = 17 AND version = 3
    compare_and_swap(order, state="paid")    # one UPDATE of what is named, and nothing else

Both raise :exc:`~idempotency_django.errors.ConcurrentModification` if the row has another version
than the object in memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import connections, models, transaction
from django.db.models import F
from django.forms import Field as FormField
from django.forms import HiddenInput
from django.utils.translation import gettext_lazy as _

from ...errors import ConcurrentModification
from .locks import (
    assign_changes,
    has_primary_key,
    in_transaction,
    lock_root_table,
    on_rollback,
    table_row,
    write_alias,
)

CARRIES_VERSION: Final = "idempotency_carries_version"
"""The attribute of forms that cannot lack the version."""
STALE = _(
    "This has changed since you opened the page. Your changes were not saved. Open the page again "
    "to see the current data."
)


class VersionField(models.PositiveBigIntegerField):  # type: ignore[type-arg]  # as in Django
    """The version of a row: 1 when it is created, one more with each change.

    A row whose primary key was given, and not made by the database, starts at the time in
    microseconds. The key may have been another row's, and no version names two rows.

    In forms it is a hidden field, so that what comes back is the version that the user saw.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("default", 1)
        super().__init__(*args, **options)

    def pre_save(self, instance: models.Model, add: bool) -> Any:
        version = getattr(instance, self.attname)
        if not add:
            return version + 1
        saving: _Save | None = instance.__dict__.get("_versioned")
        if has_primary_key(instance) if saving is None else saving.with_key:
            version = time.time_ns() // 1000
            setattr(instance, self.attname, version)
        return version

    def formfield(self, **options: Any) -> FormField | None:
        # Not the admin's widget for integers: the version is not editable.
        return super().formfield(**options | {"widget": HiddenInput})

    def check(self, **options: Any) -> list[CheckMessage]:
        errors = super().check(**options)
        if not issubclass(self.model, Versioned):
            errors.append(
                Error(
                    "A VersionField has no effect in a model that is not Versioned.",
                    hint=f"Write class {self.model.__name__}(Versioned, models.Model).",
                    obj=self,
                    id="idempotency_django.E032",
                )
            )
        return errors


def version_field(model: type[models.Model]) -> VersionField:
    """The version field of a model.

    Raises:
        ImproperlyConfigured: it has none, or several.
    """
    found = [field for field in model._meta.concrete_fields if isinstance(field, VersionField)]
    if len(found) != 1:
        raise ImproperlyConfigured(
            f"{model._meta.label} has {len(found)} version fields, but needs exactly one. Write "
            "version = VersionField() once in the model and its parents."
        )
    return found[0]


class _Save:
    """One call of ``save()``.

    Attributes:
        expected: the version that the row must have; ``None``: there is no row yet.
        with_key: whether the object had a primary key before it, and not from the database.
        stale: whether the row has another version.
    """

    def __init__(self, expected: int | None, *, with_key: bool) -> None:
        self.expected = expected
        self.with_key = with_key
        self.stale = False


class Versioned(models.Model):
    """A model whose ``save()`` and ``delete()`` are refused if the row was changed meanwhile.

    ``save()`` costs no statement more than without, ``delete()`` one. What does not call them does
    not ask for the version: ``QuerySet.update()`` and ``delete()``, ``bulk_update()``, fixtures.
    An object that was created and not loaded is inserted, and never overwrites a row.

    Raises:
        ConcurrentModification: raised by ``save()`` and ``delete()``; nothing was written. A
            transaction around them stays usable.
    """

    class Meta:
        abstract = True

    def save(self, **options: Any) -> None:  # by name only, as in Django 6
        field, fields = version_field(type(self)), options.get("update_fields")
        expected = _expected(self)
        if fields:
            options["update_fields"] = {*fields, field.name}
        new = self._state.adding and not (fields or options.get("force_update"))
        # After a rollback, an object keeps the key that the database has made.
        with_key = has_primary_key(self) and not getattr(self._state, "key_was_made", False)
        was_adding, using = self._state.adding, options.get("using") or write_alias(self)
        saving = self._versioned = _Save(None if new else expected, with_key=with_key)
        try:
            with _usable_after(saving, using, self):
                super().save(**options)
        finally:
            self.__dict__.pop("_versioned", None)  # a receiver may have saved it again
        if was_adding:
            again = partial(vars(self._state).update, adding=True, key_was_made=not with_key)
            on_rollback(using, again)

    # The one place where Django lets the WHERE of an UPDATE be changed. It is private, and takes
    # other arguments in each version: all but the first are passed on as they are.
    def _do_update(  # type: ignore[override]
        self, base_qs: Any, using: str, *args: Any, **options: Any
    ) -> Any:
        saving: _Save | None = self.__dict__.get("_versioned")
        field = version_field(type(self))
        if saving is None or field.model is not base_qs.model:  # a fixture; another table
            return super()._do_update(base_qs, using, *args, **options)
        if saving.expected is None:
            return False  # Django goes on with an INSERT
        unchanged = base_qs.filter(**{field.attname: saving.expected})
        updated = super()._do_update(unchanged, using, *args, **options)
        if not updated:
            saving.stale = True
            raise stale(self, saving.expected)
        advance(self, saving.expected, using)
        return updated

    def delete(self, using: str | None = None, keep_parents: bool = False) -> Any:
        using = using or write_alias(self)
        if self.pk is None:
            return super().delete(using=using, keep_parents=keep_parents)  # raises Django's error
        with in_transaction(using):
            lock_root_table(self, using)
            claim_version(self, using)  # first, so that it cannot change while it is deleted
            return super().delete(using=using, keep_parents=keep_parents)

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        """Validate the version, too, so that a stale form has an error."""
        super().clean_fields(exclude=exclude)
        field = version_field(type(self))
        if self._state.adding or field.name in (exclude or ()):
            return
        row = type(self)._base_manager.using(write_alias(self)).filter(pk=self.pk)
        if not row.filter(**{field.attname: getattr(self, field.attname)}).exists():
            raise ValidationError(STALE, code="stale")

    @classmethod
    def check(cls, **options: Any) -> list[CheckMessage]:
        errors = super().check(**options)
        try:
            version_field(cls)
        except ImproperlyConfigured as error:
            errors.append(Error(str(error), obj=cls, id="idempotency_django.E032"))
        if apps.is_installed("django.contrib.admin"):
            errors += _unversioned_inlines(cls)
        return errors


def _unversioned_inlines(model: type[models.Model]) -> Iterator[Error]:
    """The inlines of a versioned model whose form may lack the version."""
    from django.contrib.admin.sites import all_sites  # noqa: PLC0415  # it may not be installed

    for site in all_sites:
        for each in filter(site.is_registered, apps.get_models()):
            parent = site.get_model_admin(each)
            for inline in parent.inlines:
                if inline.model is model and not hasattr(inline.form, CARRIES_VERSION):
                    yield Error(
                        f"{inline.__name__} of {type(parent).__name__} has a form that may lack "
                        "the version. A save of a stale line would overwrite newer changes.",
                        hint="Write form = VersionedForm in the inline.",
                        obj=inline,
                        id="idempotency_django.E034",
                    )


def compare_and_swap(obj: models.Model, /, **changes: Any) -> None:
    """Change fields of an object if its row still has the version that the object has in memory.

    It is one UPDATE: no ``save()``, no signals, no ``auto_now``. The object gets the new values.
    One that is an expression, such as ``F("amount") + 1``, is loaded when it is read. In
    multi-table inheritance, each table with a change takes an UPDATE.

    Args:
        obj: an object of a :class:`Versioned` model that was loaded or saved.
        changes: the new values by the names of the fields.

    Raises:
        ConcurrentModification: the row was changed or deleted meanwhile; nothing was written.
    """
    version, using = version_field(type(obj)), write_alias(obj)
    if version.name in changes:
        raise ValueError("compare_and_swap() sets the version itself. Do not pass it.")
    tables: dict[type[models.Model], dict[str, Any]] = {version.model: {}}
    for name, value in changes.items():
        field = obj._meta.get_field(name)
        tables.setdefault(field.model, {})[name] = value
    several = len(tables) > 1
    with in_transaction(using) if several else nullcontext():
        if several:
            lock_root_table(obj, using)
        claim_version(obj, using, tables.pop(version.model))
        for model, values in tables.items():
            table_row(model, obj, using).update(**values)
    advance(obj, getattr(obj, version.attname), using)
    assign_changes(obj, using, changes)


def claim_version(obj: models.Model, using: str, changes: Mapping[str, Any] | None = None) -> None:
    """Change the row, and lock it until the transaction's end, if its version is the object's."""
    field, expected = version_field(type(obj)), _expected(obj)
    rows = table_row(field.model, obj, using).filter(**{field.attname: expected})
    if not rows.update(**(changes or {}), **{field.attname: F(field.attname) + 1}):
        raise stale(obj, expected)


def advance(obj: models.Model, expected: int, using: str) -> None:
    """The object's version after its row was changed; the old one again after a rollback."""
    name = version_field(type(obj)).attname
    setattr(obj, name, expected + 1)

    def go_back() -> None:  # never forth: the hooks of several saves are not called in any order
        setattr(obj, name, min(expected, getattr(obj, name)))

    on_rollback(using, go_back)


@contextmanager
def _usable_after(saving: _Save, using: str, obj: models.Model) -> Iterator[None]:
    """Keep the transaction around a stale save usable: it has changed no row."""
    connection = connections[using]
    usable = connection.in_atomic_block and not connection.needs_rollback
    # With several tables, an UPDATE of one may come before the other's is refused.
    around = transaction.atomic(using=using) if obj._meta.parents else nullcontext()
    try:
        with around:
            yield
    except ConcurrentModification:
        if saving.stale and usable:
            transaction.set_rollback(False, using=using)  # Django has marked it for any error
        raise


def stale(obj: models.Model, expected: int) -> ConcurrentModification:
    """The error that names the object."""
    return ConcurrentModification(
        f"The {obj._meta.verbose_name} {obj.pk} was changed or deleted by another process after "
        f"version {expected} was loaded, so nothing was written. Load it again and repeat the "
        "change."
    )


def _expected(obj: models.Model) -> int:
    """The version that the object was loaded with."""
    field = version_field(type(obj))
    if field.attname in obj.get_deferred_fields():
        raise ValueError(
            f"The {obj._meta.verbose_name} {obj.pk} was loaded without its version, so "
            f"conflicting changes could not be detected. Add {field.name!r} to only(), or take it "
            "out of defer()."
        )
    return getattr(obj, field.attname)  # type: ignore[no-any-return]
