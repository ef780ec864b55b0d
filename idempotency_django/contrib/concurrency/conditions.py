"""Preconditions: a change is executed only if the resource is still what the client has read.

``If-Match`` is compared with the resource while its row is locked, and the view runs under that
lock. The order is authentication, replay, precondition, view: a retry of a change that succeeded
gets its response, and not 412 for the version that the change itself has made.

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
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured, ObjectDoesNotExist
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.utils.http import parse_etags

from ...errors import IdempotencyError
from ...http import PROTECTED, is_marked, name_of, problem_response
from .errors import PreconditionFailed, PreconditionRequired
from .locks import in_transaction, lock, refuse_marked, write_alias
from .versions import VersionField

CHANGES: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""The methods that change the resource at a URL."""

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_ANY: Final = "*"
_ERRORS: Final = 400  # and above: the status of a response that tells of no success


def version_etag(obj: Any) -> str | None:
    """The ETag of an object's version, ``"17.3"``; ``None``: it has no version.

    It begins with the primary key, as a URL may lead to another object later.
    """
    for field in obj._meta.concrete_fields:
        if isinstance(field, VersionField):
            return f'"{quote(str(obj.pk), safe="")}.{getattr(obj, field.attname)}"'
    return None


def set_etag(response: HttpResponseBase, obj: Any) -> None:
    """Give a response the ETag of the object that it shows, unless it has one."""
    etag = version_etag(obj)
    if etag is not None and not response.has_header("ETag"):
        response["ETag"] = etag


def compare(if_match: str, etag: str | None) -> None:
    """Compare the header with the ETag of the object as it is.

    Raises:
        PreconditionFailed: the request must not be executed.
    """
    tags = parse_etags(if_match)
    if tags != [_ANY] and etag not in tags:
        raise PreconditionFailed


def run_conditionally(
    request: Any,
    find: Callable[[], Any],
    run: Callable[[Any], HttpResponseBase],
    *,
    required: bool,
) -> HttpResponseBase:
    """Run the view under a lock of the object, if ``If-Match`` holds for that.

    Args:
        request: the request.
        find: looks for the object at the URL, for this caller; raises ``Http404`` if there is none.
        run: the view, called with the locked object, or with ``None`` without ``If-Match``.
        required: whether a change must have ``If-Match``. Another condition says nothing of what
            the client has read.

    Raises:
        PreconditionRequired: the request needs ``If-Match``.
        PreconditionFailed: it does not hold, or the request has ``If-None-Match``; nothing was
            executed.
        TransactionManagementError: the view reports a success, and has marked its transaction for
            rollback.
    """
    if request.method in _SAFE:
        return run(None)
    if_match = request.headers.get("If-Match")
    if required and if_match is None:
        raise PreconditionRequired
    if "If-None-Match" in request.headers:
        raise PreconditionFailed(
            "A change cannot have If-None-Match here, so it was not executed. Leave it out, and "
            "send If-Match with the ETag that you received with the resource."
        )
    if if_match is None:
        return run(None)
    obj = find()
    using = write_alias(obj)
    with in_transaction(using):
        try:
            lock(obj, using)
        except ObjectDoesNotExist:
            raise Http404 from None
        etag = version_etag(obj)
        if etag is None and required:
            raise ImproperlyConfigured(
                f"{type(obj).__name__} has no version, so no If-Match can hold. Give the model a "
                "VersionField."
            )
        compare(if_match, etag)
        response = run(obj)
        if response.status_code < _ERRORS:
            refuse_marked(using, "The view")
        return response


def preconditions(
    find: Callable[..., Any],
    /,
    *,
    require: Collection[str] = CHANGES,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Execute a Django view only if ``If-Match`` holds; send ETags.

    Put it directly on the view's function, below ``@idempotent`` if there is one.

    Args:
        find: called with what the view is called with; returns the object of a model at the URL, or
            raises ``Http404``. Let it find only what the caller may have.
        require: the methods that are refused (428) without ``If-Match``.

    Raises:
        ImproperlyConfigured: the view is async, or a decorator is below it.
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        _validate_view(view)

        @functools.wraps(view)
        def conditional(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            look_up = functools.partial(find, request, *args, **kwargs)

            def run(_locked: Any) -> HttpResponseBase:
                response: HttpResponseBase = view(request, *args, **kwargs)
                _tag(response, look_up)
                return response

            required = request.method in require
            try:
                return run_conditionally(request, look_up, run, required=required)
            except IdempotencyError as error:
                if error.foreign or getattr(request, "idempotency", None):
                    raise  # the claim's adapter rolls back and responds
                return problem_response(error)

        return conditional

    return decorate


def _validate_view(view: Callable[..., Any]) -> None:
    """Above another decorator, a retry of a successful change would get 412, or skip a check."""
    if hasattr(view, "__wrapped__") or is_marked(view, PROTECTED) or iscoroutinefunction(view):
        raise ImproperlyConfigured(
            f"@preconditions is on {name_of(view)}, which is async or has another decorator. Put "
            "it on a plain function itself, below @idempotent and all other decorators. In an "
            "async view, use compare_and_swap()."
        )


def _tag(response: HttpResponseBase, find: Callable[[], Any]) -> None:
    """Give the view's response the ETag of the object as it is afterwards."""
    if 200 <= response.status_code < 300 and not response.has_header("ETag"):
        with suppress(Http404):  # it was deleted
            set_etag(response, find())
