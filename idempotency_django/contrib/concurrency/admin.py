"""The admin of versioned models: a stale save is a message on the form, not a lost update."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import flatten_fieldsets
from django.core.checks import CheckMessage, Error
from django.db import models
from django.http import HttpRequest, HttpResponseRedirect

from ...errors import ConcurrentModification
from .forms import VersionedForm
from .versions import STALE, version_field


class VersionedAdmin(ModelAdmin):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelAdmin`` for a :class:`~idempotency_django.contrib.concurrency.Versioned` model.

    Its form carries the version in a hidden field. Two people who edit the same object do not
    overwrite each other: the second one gets the form again, with an error message.
    """

    def get_fieldsets(self, request: HttpRequest, obj: models.Model | None = None) -> Any:
        fieldsets = list(super().get_fieldsets(request, obj))
        name = version_field(self.model).name
        if name not in flatten_fieldsets(fieldsets):
            title, options = fieldsets[-1]
            fieldsets[-1] = (title, {**options, "fields": [*options["fields"], name]})
        return fieldsets

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **options: Any
    ) -> Any:
        form = options.pop("form", self.form)
        if not issubclass(form, VersionedForm):
            form = type(form.__name__, (VersionedForm, form), {})
        return super().get_form(request, obj, change, form=form, **options)

    def changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **options)
        except ConcurrentModification:
            # Another save came between this form's validation and its UPDATE. All was rolled
            # back, and now the validation sees it.
            return super().changeform_view(request, *args, **options)

    def delete_view(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        try:
            return super().delete_view(request, *args, **options)
        except ConcurrentModification:
            self.message_user(request, str(STALE), messages.ERROR)
            return HttpResponseRedirect(request.path)

    def check(self, **options: Any) -> list[CheckMessage]:
        name = version_field(self.model).name
        errors = super().check(**options)
        if name in self.readonly_fields or name in (self.exclude or ()):
            errors.append(
                self._error(
                    f"{name!r} is in readonly_fields or exclude, so the form does not submit it."
                )
            )
        if self.list_editable:
            errors.append(self._error("The forms of list_editable do not submit a version."))
        return errors

    def _error(self, text: str) -> Error:
        return Error(
            f"{text} A save of a stale form would overwrite newer changes.",
            hint="Remove it there. The version is a hidden field of the form.",
            obj=type(self),
            id="idempotency_django.E034",
        )
