"""Forms of versioned models: a stale one is refused, with a message for its user."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.forms import ModelForm
from django.utils.translation import gettext_lazy as _

from .versions import version_field

STALE = _(
    "This has changed since you opened the page. Your changes were not saved. Open the page again "
    "to see the current data."
)


class VersionedForm(ModelForm):  # type: ignore[type-arg]  # Django's is not generic at run time
    """A ``ModelForm`` that is invalid if its object was changed since the form was shown.

    Its version field must be among its fields; it is hidden. What is changed between validation
    and ``save()`` is refused by the model's ``save()``. A new object's version is not the user's to
    choose: what is sent for it is ignored.

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
        if not self.instance._state.adding and name in self.changed_data:
            raise ValidationError(STALE, code="stale")
        return cleaned
