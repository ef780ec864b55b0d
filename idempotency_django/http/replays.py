"""Before a replay: a class-based view looks up the object in its URL, as its handler does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.db import router, transaction
from django.db.transaction import TransactionManagementError
from django.http import Http404
from django.views.generic.edit import BaseCreateView

from ..stores.records import Record

_FRAMEWORKS: Final = ("django.views.generic.", "rest_framework.")

_OURS: Final = __name__.partition(".")[0] + "."

_VARIADIC: Final = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def check_object(view: Any, record: Record) -> None:
    """Refuse callers who may not have the object in a view's URL, or for whom it is not visible.

    An object that is gone is not a reason to refuse. Where the URL does not name the primary key,
    the object may have another name now: then it is gone only if the request has deleted it.

    Args:
        view: the view, which has its request.
        record: the record to replay.

    Raises:
        Exception: an error of the view's ``get_object()``.
    """
    if not has_object(view):
        return
    try:
        try:
            view.get_object()
        except TransactionManagementError:  # it locks the object, as a leased handler's does
            with transaction.atomic():
                view.get_object()
    except Exception as error:
        is_missing = isinstance(error, Http404 | ObjectDoesNotExist)
        # REST framework has a 404 of its own.
        is_missing = is_missing or getattr(error, "status_code", None) == 404
        if not (is_missing and _is_gone(view, record)):
            raise


def has_object(view: Any) -> bool:
    """Whether ``get_object()`` of a view finds what this request is about."""
    if lookup_of(view) is None:
        return False
    detail = getattr(view, "detail", None)  # REST framework's routers tell
    if detail is not None:
        return bool(detail)
    if _has_own_lookup(view):
        return True
    return bool(_lookup(view)) and _has_rows(view) and not _creates(view)


def lookup_of(view: Any) -> Callable[[], Any] | None:
    """``get_object()`` of a view; ``None``: it has none, or one that takes arguments."""
    return view.get_object if _has_lookup(view.__class__) else None


@lru_cache(maxsize=1024)
def _has_lookup(view_class: Any) -> bool:
    get_object = getattr(view_class, "get_object", None)
    if get_object is None or inspect.iscoroutinefunction(get_object):
        return False
    parameters = [*inspect.signature(get_object).parameters.values()][1:]  # without self
    return all(each.default is not each.empty or each.kind in _VARIADIC for each in parameters)


@lru_cache(maxsize=1024)
def defining_module(view_class: type, name: str) -> str:
    """The module that a method of a view is from, ours aside; empty: there is none."""
    found = (vars(base).get(name) for base in view_class.__mro__)
    modules = (str(getattr(method, "__module__", "")) for method in found if method is not None)
    return next((module for module in modules if not module.startswith(_OURS)), "")


def _has_own_lookup(view: Any) -> bool:
    return not defining_module(view.__class__, "get_object").startswith(_FRAMEWORKS)


def _has_rows(view: Any) -> bool:
    """Whether the view declares where its objects are; it may refuse the caller there."""
    if any(getattr(view, name, None) is not None for name in ("queryset", "model")):
        return True
    return not defining_module(view.__class__, "get_queryset").startswith(_FRAMEWORKS)


def _creates(view: Any) -> bool:
    """Whether the view makes an object, so that its URL can only name another one."""
    action = getattr(view, "action", None)
    if action is not None:
        return bool(action == "create")
    changes = any(hasattr(view, each) for each in ("retrieve", "update", "destroy"))
    makes = view.request.method == "POST" and hasattr(view, "create") and not changes
    return makes or isinstance(view, BaseCreateView)


def _lookup(view: Any) -> dict[str, Any]:
    """The field by which the view's URL names its object, and its value; or nothing."""
    names = {}
    if hasattr(view, "lookup_field"):
        names = {view.lookup_url_kwarg or view.lookup_field: view.lookup_field}
    elif hasattr(view, "pk_url_kwarg"):
        names = {view.pk_url_kwarg: "pk", view.slug_url_kwarg: view.get_slug_field()}
    return next(
        ({field: view.kwargs[name]} for name, field in names.items() if name in view.kwargs), {}
    )


def _is_gone(view: Any, record: Record) -> bool:
    """Whether the object in the URL exists for no caller; ``False``: unknown."""
    lookup, payload = _lookup(view), record.payload
    deleted = view.request.method == "DELETE" and bool(payload and 200 <= payload.status < 300)
    if not lookup:
        return deleted
    try:
        model = view.get_queryset().model
        keeps_name = deleted or lookup.keys() <= {"pk", model._meta.pk.name}
        rows = model._base_manager.using(router.db_for_write(model))
        return keeps_name and not rows.filter(**lookup).exists()
    except Exception:  # noqa: BLE001  # no model is known, or the URL can name none of its objects
        return False
