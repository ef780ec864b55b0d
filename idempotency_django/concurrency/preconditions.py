"""Preconditions: a change is executed only if the resource is still what the client has read.

``If-Match`` is compared with the resource while its row is locked, and the view runs under that
lock. The order is authentication, replay, precondition, view: a retry of a change that succeeded
gets its answer, and not 412 for the version that the change itself has made.

::

    def invoice_of(request, pk):
        return get_object_or_404(Invoice, pk=pk, owner=request.user)

    @login_required
    @idempotent
    @preconditions(invoice_of)
    def invoice(request, pk): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from ..errors import IdempotencyError
from ..http.declared import is_marked
from ..http.messages import problem_response
from ..http.opening import PROTECTED, held_as, innermost, marked_as_part, name_of, vars_of
from .conditions import checked_etag, version_etag
from .resources import CHANGES, Resource, Run, run_conditionally


def preconditions(
    find: Callable[..., Any],
    /,
    *,
    require: Collection[str] = CHANGES,
    etag: Callable[[Any], str | None] | None = None,
    modified: Callable[[Any], datetime | None] | None = None,
    creates: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Execute a Django view only if the request's conditional headers hold; send ETags.

    Put it directly on the view's function, below ``@idempotent`` if there is one.

    Args:
        find: called with what the view is called with; returns the object at the URL, or raises
            ``Http404``, or returns ``None``. Let it find only what the caller may have.
        require: the methods that are refused (428) without ``If-Match``.
        etag: makes the ETag of an object, in its quotation marks; by default of its version, and of
            its primary key if that is not in the URL.
        modified: when an object was last changed; without it, conditions on dates are ignored.
        creates: whether a PUT creates what is not there. ``If-None-Match: *`` then creates it once,
            if the view inserts it by a key that is unique, and does not update it.

    Raises:
        ImproperlyConfigured: the view is async, or a decorator is below it.
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_unfit(view)

        @functools.wraps(view)
        def conditional(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            resource = _ViewResource(
                request,
                functools.partial(find, request, *args, **kwargs),
                etag or functools.partial(_version_etag, {*map(str, (*args, *kwargs.values()))}),
                modified,
                required=request.method in require,
                creates=creates,
            )
            run = functools.partial(_with_etag, resource, lambda: view(request, *args, **kwargs))
            try:
                return run_conditionally(resource, run)
            except IdempotencyError as error:
                if error.foreign or getattr(request, "idempotency", None):
                    raise  # the claim's adapter rolls back and answers
                return problem_response(error)

        return marked_as_part(conditional)

    return decorate


def _refuse_unfit(view: Callable[..., Any]) -> None:
    if is_marked(view, PROTECTED):
        raise ImproperlyConfigured(
            "@preconditions is above @idempotent, so a retry of a change that succeeded would get "
            "412 and not its answer. Put @preconditions below @idempotent."
        )
    if held_as(view) is not None or "__wrapped__" in vars_of(view):
        raise ImproperlyConfigured(
            f"@preconditions is above another decorator of {name_of(innermost(view))}, which would "
            "not run before a replay. Put @preconditions on the function itself, below all others."
        )
    if iscoroutinefunction(view):
        raise ImproperlyConfigured(
            "@preconditions is on an async view, which no transaction can span. Use a plain view, "
            "or compare_and_swap() in the view."
        )


def _version_etag(in_url: set[str], obj: Any) -> str | None:
    return version_etag(obj, named_by_key=str(getattr(obj, "pk", "")) in in_url)


class _ViewResource(Resource):
    """What a request to a plain Django view is about."""

    def __init__(
        self,
        request: HttpRequest,
        find: Callable[[], Any],
        etag: Callable[[Any], str | None],
        modified: Callable[[Any], datetime | None] | None,
        *,
        required: bool,
        creates: bool,
    ) -> None:
        super().__init__(request, required=required, creates=creates)
        self._find = find
        self._etag = etag
        self._modified = modified

    def find(self) -> Any:
        return self._find()

    def etag(self, obj: Any) -> str | None:
        return checked_etag(self._etag(obj), "The etag= of @preconditions")

    def form(self) -> str:
        accept: str = self.headers.get("Accept", "")  # by which the view may choose
        return "" if accept == "*/*" else accept

    def modified(self, obj: Any) -> datetime | None:
        return self._modified(obj) if self._modified else None

    def not_modified(self, etag: str | None) -> HttpResponseBase:
        response = HttpResponse(status=304)
        del response["Content-Type"]
        return _tagged(response, etag)


def _with_etag(resource: _ViewResource, view: Run) -> HttpResponseBase:
    """The view's answer with the ETag of the object as it is afterwards."""
    response = view()
    if not 200 <= response.status_code < 300 or response.has_header("ETag"):
        return response
    try:
        obj = resource.find()
    except Http404:
        return response
    return response if obj is None else _tagged(response, resource.shown_etag(obj))


def _tagged(response: HttpResponseBase, etag: str | None) -> HttpResponseBase:
    if etag is not None:
        response["ETag"] = etag
    return response
