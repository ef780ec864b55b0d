"""Preconditions for REST framework: ``ETag``, ``If-Match``, 412 and 428.

::

    class Invoices(PreconditionMixin, IdempotentViewMixin, viewsets.ModelViewSet):
        require_preconditions = {"PUT", "PATCH", "DELETE"}

The order is authentication, permissions, replay, precondition, handler, in either order of
the mixins. It also works alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.http.response import HttpResponseBase

from ...drf import problem
from ...errors import IdempotencyError
from ...http import PROTECTED, has_object, lookup_of, name_of
from ...lazy import extra
from .conditions import CHANGES, run_conditionally, set_etag

with extra("drf"):
    from rest_framework.request import Request


class PreconditionMixin:  # see below
    # Described above and below: for a view without a docstring, OpenAPI generators would publish
    # the docstring of this base.

    # Without a value, which would hide that of a base that comes after this one.

    require_preconditions: ClassVar[Collection[str]]
    """The methods that require ``If-Match`` (else 428); none by default."""

    _found_object: Any = None  # the last result of get_object()
    _locked_object: Any = None  # the subject of the handler's preconditions

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        look_up = lookup_of(self)
        if look_up is not None:
            self.get_object = functools.partial(_get_object, self, look_up)
        # Before the others: the protection from duplicates is then around this.
        _guard_handler(self, request)
        super().initial(request, *args, **kwargs)  # type: ignore[misc]

    def finalize_response(
        self, request: Request, response: HttpResponseBase, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        response = super().finalize_response(request, response, *args, **kwargs)  # type: ignore[misc]
        shown = _shown_object(self, response)
        # A page of the browsable API shows its caller and a token: no other page is like it.
        media_type = getattr(request, "accepted_media_type", None) or ""
        if shown is not None and not media_type.startswith("text/html"):
            set_etag(response, shown)
        return response


def _get_object(view: Any, look_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``get_object()`` of a view: the locked object if there is one."""
    view._found_object = view._locked_object or look_up(*args, **kwargs)
    return view._found_object


def _shown_object(view: Any, response: Any) -> models.Model | None:
    """The object in a response whose ETag conditions on this URL, or on a new one's, can name.

    That is what ``get_object()`` has found, or what was created. An action may show another one.
    """
    serializer = getattr(getattr(response, "data", None), "serializer", None)
    shown = getattr(serializer, "instance", None)
    if not (isinstance(shown, models.Model) and 200 <= response.status_code < 300):
        return None
    is_created = response.status_code == 201 and view._found_object is None
    return shown if is_created or shown == view._found_object else None


def _guard_handler(view: Any, request: Request) -> None:
    """Put the check around the handler; the protection from duplicates is then around both."""
    name = (request.method or "").lower()
    handler = getattr(view, name, None)
    if handler is None:
        return
    if hasattr(handler, PROTECTED):
        raise ImproperlyConfigured(
            f"@idempotent is on {name_of(handler)} itself, inside the preconditions: a retry of "
            "a successful change would get 412 instead of its response. Use IdempotentViewMixin."
        )

    @functools.wraps(handler)
    def conditional(request: Request, *args: Any, **kwargs: Any) -> Any:
        return _respond(view, request, functools.partial(handler, request, *args, **kwargs))

    setattr(view, name, conditional)


def _respond(view: Any, request: Request, handler: Callable[[], Any]) -> HttpResponseBase:
    """The response of the handler, if the preconditions hold; else 412 or 428."""
    required = request.method in getattr(view, "require_preconditions", ())

    def run(locked: Any) -> HttpResponseBase:
        view._locked_object = locked
        return handler()  # type: ignore[no-any-return]

    try:
        if has_object(view):
            return run_conditionally(request, view.get_object, run, required=required)
        is_conditional = "If-Match" in request.headers or "If-None-Match" in request.headers
        if request.method in CHANGES and (required or is_conditional):
            raise ImproperlyConfigured(
                f"{name_of(type(view))} has preconditions for {request.method}, but no "
                "get_object() that finds the object by the URL alone. Define it."
            )
        return handler()  # type: ignore[no-any-return]
    except IdempotencyError as error:
        if error.foreign or getattr(request._request, "idempotency", None):
            raise  # the claim's adapter rolls back and responds
        return problem(view, error)
    finally:
        view._locked_object = None
