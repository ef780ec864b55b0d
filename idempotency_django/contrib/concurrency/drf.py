"""Preconditions for REST framework: ``ETag``, ``If-Match``, ``If-None-Match``, 304, 412 and 428.

::

    class Invoices(PreconditionMixin, IdempotentViewMixin, viewsets.ModelViewSet):
        require_preconditions = {"PUT", "PATCH", "DELETE"}

The order is authentication, permissions, replay, precondition, handler, in either order of
the mixins. It also works alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured, ObjectDoesNotExist, PermissionDenied
from django.db import models
from django.http import Http404
from django.http.response import HttpResponseBase

from ...drf import problem
from ...errors import IdempotencyError
from ...http import (
    PROTECTED,
    has_object,
    is_named_by_key,
    lookup_of,
    name_of,
)
from ...lazy import extra
from .conditions import (
    CHANGES,
    NOT_COMPARED,
    SAFE,
    Conditions,
    Resource,
    Run,
    checked_etag,
    representation_etag,
    run_conditionally,
    version_etag,
    with_etag,
)

with extra("drf"):
    from rest_framework.exceptions import APIException
    from rest_framework.renderers import BrowsableAPIRenderer, HTMLFormRenderer
    from rest_framework.request import Request

_GUARDED: Final = "_idempotency_guarded"
"""The attribute of a handler that checks preconditions."""


class PreconditionMixin:  # see below
    # Described above and below: for a view without a docstring, OpenAPI generators would publish
    # the docstring of this base.

    # Without values, which would hide those of a base that comes after this one.

    require_preconditions: ClassVar[Collection[str]]
    """The methods that require ``If-Match`` (else 428); none by default."""

    put_creates: ClassVar[bool]
    """Whether PUT creates a missing object. ``If-None-Match: *`` then creates it once."""

    _resource: Resource | None = None  # the subject of the handler's preconditions
    _found_object: Any = None  # the result of get_object()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        record_lookup(self)
        # Before the others: the protection from duplicates is then around this.
        _guard_handler(self, request)
        super().initial(request, *args, **kwargs)  # type: ignore[misc]

    def get_object(self, *args: Any, **kwargs: Any) -> Any:
        compared = NOT_COMPARED if self._resource is None else self._resource.compared
        if compared is NOT_COMPARED:
            return super().get_object(*args, **kwargs)  # type: ignore[misc]
        if compared is None:
            raise Http404
        return compared  # locked, compared, and checked for this caller

    def finalize_response(
        self, request: Request, response: HttpResponseBase, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        response = super().finalize_response(request, response, *args, **kwargs)  # type: ignore[misc]
        untagged = not (response.has_header("ETag") or _is_page(response))
        if untagged and 200 <= response.status_code < 300:
            obj = object_in_response(response)
            if obj is not None and is_compared(self, obj, response.status_code):
                with_etag(response, representation_etag(_etag(self, obj), _form(request)))
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
        """The time of the object's last change; by default conditions on dates are ignored."""
        return None


def _resource_of(view: Any, request: Request) -> Resource:
    """The resource of a request to a view that has an object."""
    look_up = lookup_of(view)
    creates = getattr(view, "put_creates", False)
    required = request.method in getattr(view, "require_preconditions", ())

    def etag(obj: Any) -> str | None:
        found = _etag(view, obj)
        if found is None and required:
            raise ImproperlyConfigured(
                f"{name_of(type(view))} requires If-Match, but its objects have no ETag. Give the "
                "model a VersionField, or override get_etag(self, obj)."
            )
        return found

    return Resource(
        request,
        look_up or (lambda: None),
        etag,
        view.get_last_modified,
        form=_form(request),
        required=required,
        creates=creates,
        model=view.get_queryset().model if creates and request.method == "PUT" else None,
    )


def _etag(view: Any, obj: Any) -> str | None:
    return checked_etag(view.get_etag(obj), f"get_etag() of {name_of(type(view))}")


def _form(request: Request) -> str:
    media_type: str = request.accepted_media_type
    return "" if media_type == "application/json" else media_type


def _guard_handler(view: Any, request: Request) -> None:
    """Put the check around the handler; the protection from duplicates is then around both."""
    name = (request.method or "").lower()
    handler = getattr(view, name, None)
    if handler is None or hasattr(handler, _GUARDED):  # a loop around dispatch() runs it again
        return
    if hasattr(handler, PROTECTED):
        raise ImproperlyConfigured(
            f"@idempotent is on {name_of(handler)} itself, inside the preconditions: a retry of "
            "a successful change would get 412 instead of its response. Use IdempotentViewMixin."
        )

    @functools.wraps(handler)
    def conditional(request: Request, *args: Any, **kwargs: Any) -> Any:
        return _respond(view, request, functools.partial(handler, request, *args, **kwargs))

    setattr(conditional, _GUARDED, True)
    setattr(view, name, conditional)


def _is_page(negotiated: Any) -> bool:
    """Whether a page of HTML was negotiated for a request, or made as its response."""
    renderer = getattr(negotiated, "accepted_renderer", None)
    return isinstance(renderer, BrowsableAPIRenderer | HTMLFormRenderer)


def _respond(view: Any, request: Request, run: Run) -> HttpResponseBase:
    """The response of the handler, if the preconditions hold; else 304, 412 or 428."""
    try:
        if not has_object(view):
            _validate_lookup(view, request)
            return run()
        if request.method in SAFE and _is_page(request):
            return run()  # it shows its caller and a token: no state's page is like another
        resource = view._resource = _resource_of(view, request)
        if resource.method in SAFE and is_action(view):
            return _read_action(view, resource, run)
        return run_conditionally(resource, functools.partial(_changed, view, resource, run))
    except IdempotencyError as error:
        if error.foreign or getattr(request._request, "idempotency", None):
            raise  # the claim's adapter rolls back and responds
        return problem(view, error)
    finally:
        view._resource = None


def _validate_lookup(view: Any, request: Request) -> None:
    """Refuse a change whose preconditions would be ignored."""
    required = request.method in getattr(view, "require_preconditions", ())
    if request.method in CHANGES and (required or Conditions.of(request.headers).for_change()):
        raise ImproperlyConfigured(
            f"{name_of(type(view))} has preconditions for {request.method}, but no get_object() "
            "that finds the object by the URL alone. Define it."
        )


def _read_action(view: Any, resource: Resource, run: Run) -> HttpResponseBase:
    """Compare afterwards, if the action has shown what conditions are about."""
    response = run()
    shown = object_in_response(response)
    if shown is None or not is_compared(view, shown, response.status_code):
        return response
    return response if resource.holds(shown) else resource.not_modified(shown)


def _changed(view: Any, resource: Resource, run: Run) -> HttpResponseBase:
    """Refuse a change of another object than the compared one."""
    response = run()
    found, shown = resource.compared, object_in_response(response)
    if (
        resource.method in CHANGES
        and isinstance(found, models.Model)
        and shown is not None
        and not is_same(found, shown)
    ):
        raise ImproperlyConfigured(
            f"{name_of(type(view))} compared the preconditions of {resource.method} with the "
            f"{found._meta.verbose_name} {found.pk} of get_object(), but responded with the "
            f"{shown._meta.verbose_name} {shown.pk}. The change was rolled back. Return the "
            "changed object from get_object(), or move it to its own view."
        )
    return response


# The object that a response shows, and the one that the view has looked up.


def record_lookup(view: Any) -> None:
    """Remember the result of ``get_object()``: the preconditions are about it."""
    view._found_object = None
    look_up = getattr(view, "get_object", None)
    if look_up is None or iscoroutinefunction(look_up) or "get_object" in vars(view):
        return

    @functools.wraps(look_up)
    def get_object(*args: Any, **kwargs: Any) -> Any:
        view._found_object = look_up(*args, **kwargs)
        return view._found_object

    view.get_object = get_object


def object_in_response(response: Any) -> models.Model | None:
    """The object that a response shows."""
    serializer = getattr(getattr(response, "data", None), "serializer", None)
    obj = getattr(serializer, "instance", None)
    return obj if isinstance(obj, models.Model) and obj.pk else None


def is_compared(view: Any, shown: models.Model, status: int) -> bool:
    """Whether conditions are compared with the object that is shown; also a new one's will be."""
    if not has_object(view):
        return status == 201
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
