"""Preconditions for REST framework: ``ETag``, ``If-Match``, ``If-None-Match``, 304, 412 and 428.

::

    class Invoices(PreconditionMixin, IdempotentViewMixin, viewsets.ModelViewSet):
        require_preconditions = {"PUT", "PATCH", "DELETE"}

The order is authentication, permissions, replay, precondition, handler, whichever of the two
mixins comes first. It also works alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from datetime import datetime
from types import MethodType
from typing import Any, ClassVar, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.http import Http404, HttpResponseNotModified
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from ..concurrency.preconditions import (
    CHANGES,
    SAFE,
    Resource,
    Run,
    checked_etag,
    representation_etag,
    run_conditionally,
    version_etag,
)
from ..errors import IdempotencyError
from ..http.replays import has_object, is_named_by_key, lookup_of
from ..http.unwrapping import PROTECTED, cached_on, mark_part_of_view, name_of, protect_innermost
from ..http.wrapping import method_of
from . import IdempotentViewMixin
from .adapter import (
    is_action,
    is_compared,
    is_page,
    is_same,
    object_in_response,
    problem,
    record_lookup,
)

_UNKNOWN: Final = object()


class PreconditionMixin:  # see below
    # Described above and below: for a view without a docstring, OpenAPI generators would publish
    # the docstring of this base.

    # Without values, which would hide those of a base that comes after this one.

    require_preconditions: ClassVar[Collection[str]]
    """The methods that are refused (428) without ``If-Match``; none if it is not set."""

    put_creates: ClassVar[bool]
    """Whether PUT creates what is not there. ``If-None-Match: *`` then creates it once."""

    _conditional_object: Any = _UNKNOWN  # what the handler is to find
    _found_object: Any = None  # what get_object() has returned

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        record_lookup(self)
        # Before the others: what protects the handler from duplicates is then put around this.
        _guard_handler(self, request)
        super().initial(request, *args, **kwargs)  # type: ignore[misc]

    def get_object(self, *args: Any, **kwargs: Any) -> Any:
        if self._conditional_object is _UNKNOWN:
            return super().get_object(*args, **kwargs)  # type: ignore[misc]
        if self._conditional_object is None:
            raise Http404
        return self._conditional_object  # locked, compared, and checked for this caller

    def finalize_response(
        self, request: Request, response: HttpResponseBase, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        response = super().finalize_response(request, response, *args, **kwargs)  # type: ignore[misc]
        untagged = not (response.has_header("ETag") or is_page(response))
        if untagged and 200 <= response.status_code < 300:
            obj = object_in_response(response)
            if obj is not None and is_compared(self, obj, response.status_code):
                etag = checked_etag(self.get_etag(obj), f"get_etag() of {name_of(type(self))}")
                etag = representation_etag(etag, _form(request))
                if etag is not None:
                    response["ETag"] = etag
        return response

    # For subclasses to override.

    def get_etag(self, obj: Any) -> str | None:
        """The ETag of an object, in its quotation marks; by default that of its version.

        If the URL names the object by something else than its primary key, that is in it, too. A
        weak one (``W/"…"``) counts for ``If-None-Match`` only: ``If-Match`` needs a strong one.
        """
        if not isinstance(obj, models.Model):
            return None
        return version_etag(obj, named_by_key=is_named_by_key(self, obj))

    def get_last_modified(self, obj: Any) -> datetime | None:
        """When the object was last changed; by default conditions on dates are ignored."""
        return None


class _DRFResource(Resource):
    """What a request to a DRF view is about."""

    def __init__(self, view: Any, request: Request) -> None:
        self._view = view
        self.has_object = has_object(view)
        required = request.method in _required(view) and self.has_object
        super().__init__(request, required=required, creates=getattr(view, "put_creates", False))
        if self.creates:
            self.model = view.get_queryset().model

    def find(self) -> Any:
        look_up = lookup_of(self._view)
        return look_up() if look_up else None

    def etag(self, obj: Any) -> str | None:
        name = name_of(type(self._view))
        etag = checked_etag(self._view.get_etag(obj), f"get_etag() of {name}")
        if etag is None and self.required:
            raise ImproperlyConfigured(
                f"{name} requires If-Match and has no ETag to compare it with. Give the model a "
                "VersionField, or override get_etag(self, obj)."
            )
        return etag

    def form(self) -> str:
        return _form(self._view.request)

    def modified(self, obj: Any) -> datetime | None:
        modified: datetime | None = self._view.get_last_modified(obj)
        return modified

    def keep(self, obj: Any) -> None:
        self._view._conditional_object = obj

    def forget(self) -> None:
        self._view._conditional_object = _UNKNOWN

    def not_modified(self, etag: str | None) -> HttpResponseBase:
        response = HttpResponseNotModified()  # which no renderer has to make of no data
        if etag is not None:
            response["ETag"] = etag
        return response


def _form(request: Request) -> str:
    media_type: str = request.accepted_media_type
    return "" if media_type == "application/json" else media_type


def _guard_handler(view: Any, request: Request) -> None:
    """Put the check around the handler's innermost function, inside all of its decorators."""
    name = (request.method or "").lower()
    placed = view.__dict__.setdefault("_conditional_handlers", {})
    handler = getattr(view, name, None)
    if handler is None:
        return
    if name not in placed:  # else a loop around dispatch() runs the view again
        placed[name] = _guarded(view, handler)
    setattr(view, name, placed[name])


def _guarded(view: Any, handler: Any) -> Any:
    function = method_of(view, handler)
    if hasattr(function, PROTECTED):
        raise ImproperlyConfigured(
            f"@idempotent is on {name_of(function)} itself, inside the preconditions: a retry of a "
            "change that succeeded would get 412 and not its answer. Put @idempotent on the class, "
            "or use IdempotentViewMixin."
        )
    try:
        guarded = cached_on(
            function, "_conditional", lambda: protect_innermost(function, _conditional)
        )
    except ImproperlyConfigured:  # a decorator that is not known
        if isinstance(view, IdempotentViewMixin):
            raise
        guarded = _conditional(function)  # alone, no replay comes before the decorator
    return MethodType(guarded, view)


def _conditional(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def conditional(view: Any, request: Request, *args: Any, **kwargs: Any) -> Any:
        return _respond(view, request, functools.partial(function, view, request, *args, **kwargs))

    return mark_part_of_view(conditional)


def _respond(view: Any, request: Request, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    try:
        resource = _DRFResource(view, request)
        if not resource.has_object:
            _validate_lookup(view, resource)
            return run()
        if resource.method in SAFE and is_page(request):
            return run()  # it shows its caller and a token: no state's page is like another
        if resource.method in SAFE and is_action(view):
            return _read_action(view, resource, run)
        return run_conditionally(resource, functools.partial(_changed, view, resource, run))
    except IdempotencyError as error:
        if error.foreign or getattr(request._request, "idempotency", None):
            raise  # the claim's adapter rolls back and answers
        return problem(view, error)
    finally:
        view._conditional_object = _UNKNOWN


def _read_action(view: Any, resource: Resource, run: Run) -> HttpResponseBase:
    """Compare afterwards, if the action has shown what conditions are about."""
    response = run()
    shown = object_in_response(response)
    if shown is None or not is_compared(view, shown, response.status_code):
        return response
    return response if resource.holds(shown) else resource.not_modified(resource.shown_etag(shown))


def _changed(view: Any, resource: Resource, run: Run) -> HttpResponseBase:
    """Refuse a change of another object than the one that its conditions were compared with."""
    response = run()
    found, shown = view._conditional_object, object_in_response(response)
    if (
        resource.method in CHANGES
        and isinstance(found, models.Model)
        and shown is not None
        and not is_same(found, shown)
    ):
        raise ImproperlyConfigured(
            f"{name_of(type(view))} compares the conditions of {resource.method} with what "
            f"get_object() returns, the {found._meta.verbose_name} {found.pk}, and has answered "
            f"with the {shown._meta.verbose_name} {shown.pk}. It was rolled back. Let get_object() "
            "return what this URL changes, or give that a view of its own."
        )
    return response


def _required(view: Any) -> Collection[str]:
    methods: Collection[str] = getattr(view, "require_preconditions", ())
    return methods


def _validate_lookup(view: Any, resource: Resource) -> None:
    """Refuse a change whose conditions nobody would look at."""
    if resource.method in CHANGES and (
        resource.conditions.for_change() or resource.method in _required(view)
    ):
        raise ImproperlyConfigured(
            f"{name_of(type(view))} has preconditions for {resource.method} and no get_object() "
            "that finds the object by the URL alone. Define it."
        )
