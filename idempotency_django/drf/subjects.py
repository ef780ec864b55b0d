"""Which object an answer shows, and whether conditions are compared with that one."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import models
from django.http import Http404
from rest_framework.exceptions import APIException

from ..http.objects import has_object, lookup_of

_CREATED: Final = 201


def watch_lookup(view: Any) -> None:
    """Remember what ``get_object()`` returns, of whatever class it is: conditions are about it."""
    view._found_object = None
    look_up = getattr(view, "get_object", None)
    if look_up is None or iscoroutinefunction(look_up) or "get_object" in vars(view):
        return

    @functools.wraps(look_up)
    def get_object(*args: Any, **kwargs: Any) -> Any:
        view._found_object = look_up(*args, **kwargs)
        return view._found_object

    view.get_object = get_object


def shown_by(response: Any) -> models.Model | None:
    """The object that an answer shows."""
    serializer = getattr(getattr(response, "data", None), "serializer", None)
    obj = getattr(serializer, "instance", None)
    return obj if isinstance(obj, models.Model) and obj.pk else None


def is_compared(view: Any, shown: models.Model, status: int) -> bool:
    """Whether conditions are compared with the object that is shown; also a new one's will be."""
    if not has_object(view):
        return status == _CREATED
    if view._found_object is None:
        look_up = lookup_of(view)
        with suppress(Http404, ObjectDoesNotExist, APIException, PermissionDenied):
            view._found_object = look_up() if look_up else None
    return is_same(view._found_object, shown)


def is_same(found: Any, shown: models.Model) -> bool:
    """Whether two objects are one row, which in multi-table inheritance has several models."""
    if not isinstance(found, models.Model) or found.pk != shown.pk:
        return False
    one, other = found._meta.concrete_model, shown._meta.concrete_model
    return issubclass(one, other) or issubclass(other, one)  # type: ignore[arg-type]


def is_action(view: Any) -> bool:
    """Whether the handler is an ``@action``, which may show something else than its object."""
    return hasattr(getattr(type(view), getattr(view, "action", None) or "", None), "mapping")
