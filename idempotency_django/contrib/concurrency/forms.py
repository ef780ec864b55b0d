"""Forms of versioned models, also in the admin, which carry the version that the user saw."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import flatten_fieldsets
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.forms import ModelForm
from django.http import HttpRequest

from .versions import CARRIES_VERSION, version_field


class VersionedForm(ModelForm):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelForm`` that has the version field of its object, and cannot lack it.

    Each form with the version, which is hidden, is invalid if its object was changed since the form
    was shown: the model validates that. What is changed between validation and ``save()`` is
    refused by the model's ``save()``. A new object's version is not the user's to choose: what is
    sent for it is ignored.

    Raises:
        ImproperlyConfigured: raised by ``clean()`` if the version is not among the fields.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        name = version_field(self._meta.model).name
        if self.instance._state.adding and name in self.fields:
            self.fields[name].disabled = True  # so that its initial value counts
            self.initial[name] = getattr(self.instance, name)

    def clean(self) -> Any:
        cleaned = super().clean()
        name = version_field(self._meta.model).name
        if name not in self.fields:
            raise ImproperlyConfigured(
                f"{type(self).__name__} has no field {name!r}, so it cannot detect stale data. "
                "Add the field to Meta.fields; it is hidden. If your template renders the fields "
                "one by one, also render the hidden fields."
            )
        return cleaned


setattr(VersionedForm, CARRIES_VERSION, True)


class VersionedAdmin(ModelAdmin):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelAdmin`` for a :class:`~idempotency_django.contrib.concurrency.Versioned` model.

    Its form carries the version in a hidden field. Two people who edit the same object do not
    overwrite each other: the second one gets the form again, with an error message. A form of your
    own is a :class:`VersionedForm`, too.
    """

    form = VersionedForm

    def get_fieldsets(self, request: HttpRequest, obj: models.Model | None = None) -> Any:
        fieldsets = list(super().get_fieldsets(request, obj))
        name = version_field(self.model).name
        if name not in flatten_fieldsets(fieldsets):
            title, options = fieldsets[-1]
            fieldsets[-1] = (title, {**options, "fields": [*options["fields"], name]})
        return fieldsets
