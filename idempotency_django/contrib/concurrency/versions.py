"""Optimistic locking: a write that would overwrite another change is refused, with no extra query.

::

    class Order(Versioned, models.Model):
        version = VersionField()

    order.save()                             # UPDATE … WHERE id = 17 AND version = 3
    compare_and_swap(order, state="paid")    # one UPDATE of what is named, and nothing else

Both raise :exc:`~idempotency_django.contrib.concurrency.errors.ConcurrentModification` if the row
has another version than the object in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import NON_FIELD_ERRORS, ImproperlyConfigured, ValidationError
from django.db import connections, models
from django.db.models import F
from django.forms import Field as FormField
from django.forms import HiddenInput, ModelForm
from django.forms.formsets import DELETION_FIELD_NAME
from django.utils.translation import gettext_lazy as _

from .errors import ConcurrentModification
from .locks import in_transaction, on_rollback, write_alias

STALE: Final = _(
    "This has changed since you opened the page. Your changes were not saved. Open the page again "
    "to see the current data."
)


class VersionField(models.PositiveBigIntegerField):  # type: ignore[type-arg]  # as in Django
    """The version of a row: 1 when it is created, one more with each change.

    In forms it is a hidden field, so that what comes back is the version that the user saw.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("default", 1)
        super().__init__(*args, **options)

    def pre_save(self, instance: models.Model, add: bool) -> Any:
        version = getattr(instance, self.attname)
        return version if add else version + 1

    def formfield(self, **options: Any) -> FormField | None:
        # Not the admin's widget for integers: the version is not editable.
        return super().formfield(**options | {"widget": HiddenInput, "required": True})

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


class Versioned(models.Model):
    """A model whose ``save()`` and ``delete()`` are refused if the row was changed meanwhile.

    ``save()`` costs no statement more than without, ``delete()`` one. What does not call them does
    not ask for the version: ``QuerySet.update()`` and ``delete()``, ``bulk_update()``, fixtures.
    An object that was created and not loaded is inserted, and never overwrites a row. A rollback
    takes the version back, but no other value of the object.

    Raises:
        ConcurrentModification: raised by ``save()`` and ``delete()``; nothing was written. To
            catch it within a transaction, put an ``atomic()`` around the call, as for each error of
            the database.
    """

    class Meta:
        abstract = True

    def save(self, **options: Any) -> None:  # by name only, as in Django 6
        fields = options.get("update_fields")
        if fields:
            options["update_fields"] = {*fields, version_field(type(self)).name}
        inserts = self._state.adding and not (fields or options.get("force_update"))
        self._saved_version = None if inserts else _expected(self)
        try:
            super().save(**options)
        finally:
            self.__dict__.pop("_saved_version", None)  # a receiver may have saved it again

    # The one place where Django lets the WHERE of an UPDATE be changed. It is private: with its
    # public names alone, save() would need two statements and a transaction. It takes other
    # arguments in each version of Django, so all but the first are passed on as they are.
    def _do_update(  # type: ignore[override]
        self, base_qs: Any, using: str, *args: Any, **options: Any
    ) -> Any:
        field = version_field(type(self))
        is_saved = "_saved_version" in self.__dict__  # and no fixture
        if not is_saved or field.model is not base_qs.model:
            return super()._do_update(base_qs, using, *args, **options)
        expected = self._saved_version
        if expected is None:
            return False  # Django goes on with an INSERT
        unchanged = base_qs.filter(**{field.attname: expected})
        updated = super()._do_update(unchanged, using, *args, **options)
        if not updated:
            raise _stale(self, expected)
        _advance(self, expected, using)
        return updated

    def delete(self, using: str | None = None, keep_parents: bool = False) -> Any:
        using = using or write_alias(self)
        if self.pk is None:
            return super().delete(using=using, keep_parents=keep_parents)  # raises Django's error
        with in_transaction(using):
            _claim_version(self, using)  # first, so that it cannot change while it is deleted
            return super().delete(using=using, keep_parents=keep_parents)

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        """Validate the version, too, so that a stale form has an error."""
        super().clean_fields(exclude=exclude)
        field = version_field(type(self))
        if self._state.adding or field.name in (exclude or ()):
            return
        using = write_alias(self)
        seen = {"pk": self.pk, field.attname: getattr(self, field.attname)}
        row = type(self)._base_manager.using(using).filter(**seen)
        if connections[using].in_atomic_block:  # as in the admin: it stays so until the save
            row = row.select_for_update()
        if not row.exists():
            raise ValidationError(STALE, code="stale")

    @classmethod
    def check(cls, **options: Any) -> list[CheckMessage]:
        errors = super().check(**options)
        try:
            version_field(cls)
        except ImproperlyConfigured as error:
            return [*errors, Error(str(error), obj=cls, id="idempotency_django.E032")]
        if apps.is_installed("django.contrib.admin"):
            errors += _unversioned_forms(cls)
        return errors


def _unversioned_forms(model: type[models.Model]) -> Iterator[Error]:
    """The admin's pages and inlines of a versioned model whose forms may lack the version.

    A ``VersionedForm`` whose page leaves the version out refuses each save, and says why.
    """
    from django.contrib.admin.sites import all_sites  # noqa: PLC0415  # it may not be installed

    known = [
        (site, each) for site in all_sites for each in filter(site.is_registered, apps.get_models())
    ]
    for page in (site.get_model_admin(each) for site, each in known):
        for shown in (page, *page.inlines):
            carries_version = issubclass(shown.form, VersionedForm)
            if shown.model is model and (
                not carries_version or getattr(shown, "list_editable", None)
            ):
                yield Error(
                    f"{getattr(shown, '__name__', type(shown).__name__)} has forms that may lack "
                    "the version. A save of stale data would overwrite newer changes.",
                    hint="Write form = VersionedForm, and remove list_editable. Where you list "
                    f"fields or fieldsets, add {version_field(model).name!r}; it is hidden.",
                    obj=shown,
                    id="idempotency_django.E034",
                )


class VersionedForm(ModelForm):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelForm`` that has the version field of its object, and cannot lack it.

    Also for the admin: give it to a ``ModelAdmin`` or an inline as its ``form``.

    Each form with the version, which is hidden, is invalid if its object was changed since the form
    was shown: the model validates that. Within a transaction, as in the admin, nothing else changes
    the object until it is saved. Otherwise the model's ``save()`` refuses what was changed between
    validation and ``save()``. A new object's version is not the user's to choose: what is sent for
    it is ignored.

    Raises:
        ImproperlyConfigured: raised by ``clean()`` if the version is not among the fields.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        name = version_field(self._meta.model).name
        if self.instance._state.adding and name in self.fields:
            self.fields[name].disabled = True  # so that its initial value counts
            self.initial[name] = getattr(self.instance, name)

    def full_clean(self) -> None:
        super().full_clean()
        name = version_field(self._meta.model).name
        if self.has_error(NON_FIELD_ERRORS, "stale") or self.has_error(name):
            # Django ignores the errors of a formset's line that is to be deleted.
            self.cleaned_data.pop(DELETION_FIELD_NAME, None)

    def clean(self) -> Any:
        cleaned = super().clean()
        name = version_field(self._meta.model).name
        if name not in self.fields:
            raise ImproperlyConfigured(
                f"{type(self).__name__} has no field {name!r}, so it cannot detect stale data. "
                "Add the field to Meta.fields, or to the fields of the admin's page; it is hidden. "
                "If your template renders the fields one by one, also render the hidden fields."
            )
        return cleaned


def compare_and_swap(obj: models.Model, /, **changes: Any) -> None:
    """Change fields of an object if its row still has the version that the object has in memory.

    It is one UPDATE: no ``save()``, no signals, no ``auto_now``. The object gets the new values.
    Those of expressions, such as ``F("amount") + 1``, are loaded.

    Args:
        obj: an object of a :class:`Versioned` model that was loaded or saved.
        changes: the new values by the names of the fields. In multi-table inheritance, they are
            fields of the table that has the version.

    Raises:
        ConcurrentModification: the row was changed or deleted meanwhile; nothing was written.
    """
    version, using = version_field(type(obj)), write_alias(obj)
    for name in changes:
        if name == version.name or obj._meta.get_field(name).model is not version.model:
            raise ValueError(
                f"compare_and_swap() cannot change {name!r}. It changes fields of the table of "
                f"{version.model.__name__}, and sets the version itself."
            )
    _claim_version(obj, using, changes)
    _advance(obj, getattr(obj, version.attname), using)
    computed = [name for name in changes if hasattr(changes[name], "resolve_expression")]
    for name in changes.keys() - computed:
        setattr(obj, name, changes[name])
    if computed:
        obj.refresh_from_db(using=using, fields=computed)


def _claim_version(obj: models.Model, using: str, changes: Mapping[str, Any] | None = None) -> None:
    """Change the row, and lock it until the transaction's end, if its version is the object's."""
    field, expected = version_field(type(obj)), _expected(obj)
    # In multi-table inheritance, the condition must be in the UPDATE of the table that has the
    # version: otherwise Django makes a SELECT with it, and an UPDATE without.
    key = getattr(obj, field.model._meta.pk.attname)
    rows = field.model._base_manager.using(using).filter(pk=key, **{field.attname: expected})
    if not rows.update(**(changes or {}), **{field.attname: F(field.attname) + 1}):
        raise _stale(obj, expected)


def _advance(obj: models.Model, expected: int, using: str) -> None:
    """The object's version after its row was changed; the old one again after a rollback.

    The new one may be that of another process's change by then.
    """
    name = version_field(type(obj)).attname
    setattr(obj, name, expected + 1)

    def go_back() -> None:  # never forth: the hooks of several saves are not called in any order
        setattr(obj, name, min(expected, getattr(obj, name)))

    on_rollback(using, go_back)


def _stale(obj: models.Model, expected: int) -> ConcurrentModification:
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
