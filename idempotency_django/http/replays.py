"""Checks before a replay: the caller, and the object in the URL."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.exceptions import (
    FieldError,
    ImproperlyConfigured,
    ObjectDoesNotExist,
    ValidationError,
)
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db.transaction import TransactionManagementError
from django.http import Http404
from django.views.generic.edit import BaseCreateView

from ..stores.records import Record

_FRAMEWORKS: Final = ("django.views.generic.", "rest_framework.")

_OURS: Final = __name__.partition(".")[0] + "."

_OF_OBJECTS: Final = {"RetrieveModelMixin", "UpdateModelMixin", "DestroyModelMixin"}

_VARIADIC: Final = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}

_NO_MODEL: Final = (Http404, ImproperlyConfigured, AttributeError, AssertionError)
"""Errors of a view that is asked for its model, and has none."""


def check_object(view: Any, record: Record) -> None:
    """Let a class-based view look up the object in its URL, as its handler does.

    The view refuses callers who may not have the object, and callers for whom an existing object is
    not visible. An object that is gone is not a reason to refuse. Where the URL does not name the
    primary key, a deleted object cannot be distinguished from a renamed one: then only what
    the request itself has deleted is gone, and what it has renamed is looked up by its new name.

    Args:
        view: the view, which has its request.
        record: the record to replay.

    Raises:
        Exception: an error of the view's ``get_object()``.
    """
    if not has_object(view):
        return
    try:
        _get_object(view)
    except Exception as error:
        missing = isinstance(error, ObjectDoesNotExist)
        if not (missing or _is_not_found(error)):
            raise
        if _is_gone(view, record) or _has_renamed(view):
            return
        if missing:
            raise Http404 from error
        raise


def _get_object(view: Any) -> None:
    look_up: Any = lookup_of(view)
    if iscoroutinefunction(look_up):
        async_to_sync(look_up)()
        return
    try:
        look_up()
    except TransactionManagementError:
        alias = _alias(view)
        if connections[alias].in_atomic_block:
            raise
        with transaction.atomic(using=alias):  # it locks the object, as a leased handler's does
            look_up()


def has_object(view: Any) -> bool:
    """Whether ``get_object()`` of a view finds what this request is about."""
    if getattr(view, "get_object", None) is None:
        return False
    detail = getattr(view, "detail", None)  # REST framework's routers tell
    if _creates(view) if detail is None else not detail:
        return False
    own = _has_own_lookup(view)
    if not (own or _has_rows(view)) or lookup_of(view) is None:
        return False
    return detail is not None or own or bool(_lookup(view))


def lookup_of(view: Any) -> Callable[[], Any] | None:
    """``get_object()`` with the arguments of the view's URL; ``None``: unknown.

    Some views give it arguments, as REST framework's tutorial does (``self.get_object(pk)``). It
    gets those of the same name, or else the only one that the URL has.
    """
    get_object = getattr(view, "get_object", None)
    if get_object is None:
        return None
    signature = inspect.signature(get_object)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    bases = [base for base in type(view).__mro__ if base.__module__.startswith(_FRAMEWORKS)]
    if kinds & _VARIADIC and not any("get_object" in vars(base) for base in bases):
        return None  # its signature does not declare its arguments, and no framework calls it
    given = {"request": view.request, **view.kwargs}
    named = {name: given[name] for name in signature.parameters if name in given}
    values = (*view.args, *view.kwargs.values())
    calls = [partial(get_object, **named)]
    if len(values) == 1:
        calls.append(partial(get_object, *values))
    return next((call for call in calls if _fits(signature, call)), None)


def is_named_by_key(view: Any, model: Any) -> bool:
    """Whether the view's URLs name objects of a model by their primary key."""
    fields = ("pk", model._meta.pk.name)
    return not _has_own_lookup(view) and getattr(view, "lookup_field", None) in fields


def _fits(signature: inspect.Signature, call: partial[Any]) -> bool:
    try:
        signature.bind(*call.args, **call.keywords)
    except TypeError:
        return False
    return True


def _has_own_lookup(view: Any) -> bool:
    return not _module(view, "get_object").startswith(_FRAMEWORKS)


def _has_rows(view: Any) -> bool:
    """Whether the view declares where its objects are."""
    if any(getattr(view, name, None) is not None for name in ("queryset", "model")):
        return True
    return not _module(view, "get_queryset").startswith(_FRAMEWORKS)


def _creates(view: Any) -> bool:
    """Whether the view makes an object, so that its URL can only name another one."""
    if isinstance(view, BaseCreateView):
        return True
    if getattr(view, "action", None) is not None:
        return bool(view.action == "create")
    if view.request.method != "POST":
        return False
    bases = view.__class__.__mro__
    names = {base.__name__ for base in bases if base.__module__ == "rest_framework.mixins"}
    if "CreateModelMixin" in names and not names & _OF_OBJECTS and not _has_own_lookup(view):
        return True
    return _module(view, "post") == "rest_framework.generics"


def _module(view: Any, name: str) -> str:
    """The module that a method of a view is from."""
    return defining_module(view.__class__, name)


@lru_cache(maxsize=1024)
def defining_module(view_class: type, name: str) -> str:
    found = (vars(base).get(name) for base in view_class.__mro__)
    modules = (str(getattr(method, "__module__", "")) for method in found if method is not None)
    return next((module for module in modules if not module.startswith(_OURS)), "")


def _lookup(view: Any) -> dict[str, Any]:
    """The fields by which the view's URL names its object, and their values; or none."""
    return {field: view.kwargs[name] for name, field in _names(view).items()}


def _names(view: Any) -> dict[str, str]:
    """The arguments of the URL that name the view's object, and the fields that they are."""
    names = {}
    if hasattr(view, "lookup_field"):
        names = {view.lookup_url_kwarg or view.lookup_field: view.lookup_field}
    elif hasattr(view, "pk_url_kwarg"):
        names = {view.slug_url_kwarg: view.get_slug_field(), view.pk_url_kwarg: "pk"}
    return {name: field for name, field in names.items() if name in view.kwargs}


def _is_not_found(error: Exception) -> bool:
    """Whether the error means that there is no such object; REST framework has its own."""
    return isinstance(error, Http404) or getattr(error, "status_code", None) == 404


def _is_gone(view: Any, record: Record) -> bool:
    """Whether the object in the URL does not exist for any caller; ``False``: unknown."""
    lookup = _lookup(view)
    keys = {name: value for name, value in lookup.items() if _is_key(view, name)}
    exists = _exists(view, keys or lookup)
    if exists is not None and (keys or exists):
        return not exists
    # No object has that name now, or a lookup of the view's own has not found it, by whatever the
    # URL has. That a field is named alike shows that an object exists, never that none does: it may
    # be looked up in another way.
    payload = record.payload
    deleted = view.request.method == "DELETE" and payload and 200 <= payload.status < 300
    return bool(deleted) and not _exists(view, _fields_in_url(view))


def _is_key(view: Any, name: str) -> bool:
    """Whether a field is the primary key, which no object changes."""
    model = _model(view)
    return model is not None and name in ("pk", model._meta.pk.name)


def _has_renamed(view: Any) -> bool:
    """Whether the caller has the object by the name that this request itself has given it."""
    data = getattr(view.request, "data", None) or view.request.POST
    if not isinstance(data, dict) or _exists(view, _lookup(view)):
        return False
    names = {name: field for name, field in _names(view).items() if not _is_key(view, field)}
    given = {name: data[field] for name, field in names.items() if field in data}
    url = view.kwargs
    if given.items() <= url.items():
        return False
    view.kwargs = {**url, **given}
    try:
        _get_object(view)
    except Exception as error:
        if isinstance(error, ObjectDoesNotExist) or _is_not_found(error):
            return False
        raise
    finally:
        view.kwargs = url
    return True


def _exists(view: Any, lookup: dict[str, Any]) -> bool | None:
    """Whether the model has such an object; ``None``: unknown."""
    model = _model(view)
    if model is None or not lookup:
        return None
    try:
        return bool(model._base_manager.using(_alias(view)).filter(**lookup).exists())
    except FieldError:
        return None
    except (TypeError, ValueError, OverflowError, ValidationError):
        return False  # it can be the name of no object


def _fields_in_url(view: Any) -> dict[str, Any]:
    """The arguments of the URL that have the names of the model's fields."""
    model = _model(view)
    fields = model._meta.concrete_fields if model is not None else ()
    names = {name for field in fields for name in (field.name, field.attname)}
    return {name: value for name, value in view.kwargs.items() if name in names}


def _alias(view: Any) -> str:
    """The database in which the view's objects are written."""
    model = _model(view)
    return DEFAULT_DB_ALIAS if model is None else router.db_for_write(model)


def _model(view: Any) -> Any:
    """The model of the view's objects; ``None``: unknown."""
    if getattr(view, "queryset", None) is not None:
        return view.queryset.model
    try:
        return getattr(view, "model", None) or view.get_queryset().model
    except _NO_MODEL:
        return None
