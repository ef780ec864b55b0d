"""The admin of versioned models: a stale save is a message on the form, not a lost update."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import flatten_fieldsets
from django.db import models
from django.http import HttpRequest

from .errors import ConcurrentModification
from .forms import VersionedForm
from .versions import version_field


class VersionedAdmin(ModelAdmin):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelAdmin`` for a :class:`~idempotency_django.contrib.concurrency.Versioned` model.

    Its form carries the version in a hidden field. Two people who edit the same object do not
    overwrite each other: the second one gets the form again, with an error message. A form of your
    own is a :class:`~idempotency_django.contrib.concurrency.VersionedForm`, too.
    """

    form = VersionedForm

    def get_fieldsets(self, request: HttpRequest, obj: models.Model | None = None) -> Any:
        fieldsets = list(super().get_fieldsets(request, obj))
        name = version_field(self.model).name
        if name not in flatten_fieldsets(fieldsets):
            title, options = fieldsets[-1]
            fieldsets[-1] = (title, {**options, "fields": [*options["fields"], name]})
        return fieldsets

    def changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **options)
        except ConcurrentModification:
            # Another save came between this form's validation and its UPDATE. All was rolled
            # back, and now the validation sees it.
            return super().changeform_view(request, *args, **options)
