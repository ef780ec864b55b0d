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
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.utils.http import parse_etags, parse_header_parameters
from django.utils.translation import get_language

from ...errors import IdempotencyError
from ...http import PROTECTED, is_marked, name_of, problem_response
from ...policy import digest
from .errors import PreconditionFailed, PreconditionRequired
from .locks import in_transaction, lock, refuse_marked, write_alias
from .versions import VersionField

CHANGES: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""The methods that change the resource at a URL."""

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_ANY: Final = "*"
_JSON: Final = "application/json"
_ERRORS: Final = 400  # and above: the status of a response that tells of no success

_IS_STRONG: Final = re.compile(r'"[\x21\x23-\x2b\x2d-\x7e]*"')
_FORM: Final = re.compile(r';as=[0-9a-f]{8}"')


def version_etag(obj: Any, *, named_by_key: bool) -> str | None:
    """The ETag of an object's version, ``"3"``; ``None``: it has no version.

    Args:
        obj: the object.
        named_by_key: whether the URL holds the object's primary key. If not, it may lead to another
            object later, so the ETag holds the key: ``"17.3"``.
    """
    key = "" if named_by_key else f"{quote(str(obj.pk), safe='')}."
    for field in obj._meta.concrete_fields:
        if isinstance(field, VersionField):
            return f'"{key}{getattr(obj, field.attname)}"'
    return None


def checked_etag(etag: str | None, source: str) -> str | None:
    """The ETag, if it is a strong one; only such a one counts for ``If-Match``.

    Raises:
        ImproperlyConfigured: it is not quoted, is weak, or holds a comma or a space.
    """
    if etag is None or _IS_STRONG.fullmatch(etag):
        return etag
    raise ImproperlyConfigured(
        f"{source} returned {etag!r}, which is not a strong ETag. Return it in quotation marks, "
        "without spaces and commas: '\"3\"'."
    )


def set_etag(response: HttpResponseBase, etag: str | None, media_type: str) -> None:
    """Give a response the ETag of the state that it shows, unless it has one.

    A representation other than JSON in the project's own language has one of its own, so that no
    client gets 304 for a representation that it does not have.
    """
    if etag is None or response.has_header("ETag"):
        return
    language = get_language() or settings.LANGUAGE_CODE
    if (media_type or _JSON, language) != (_JSON, settings.LANGUAGE_CODE):
        etag = f'{etag[:-1]};as={digest(media_type, language)[:8]}"'
    response["ETag"] = etag


def compare(headers: Mapping[str, str], etag: str | None) -> None:
    """Compare ``If-Match`` and ``If-None-Match`` with the ETag of the state of what is there.

    Raises:
        PreconditionFailed: the request must not be executed.
    """
    wanted, unwanted = headers.get("If-Match"), headers.get("If-None-Match")
    if wanted is not None:
        tags = _tags(wanted)
        if tags != [_ANY] and etag not in tags:
            raise _failed(tags, etag)
    if unwanted is not None:
        tags = [tag.removeprefix("W/") for tag in _tags(unwanted)]
        if tags == [_ANY] or etag in tags:
            raise PreconditionFailed


def _tags(header: str) -> list[str]:
    """The ETags in a header, of the state that any representation shows."""
    return parse_etags(_FORM.sub('"', header))


def _failed(tags: Collection[str], etag: str | None) -> PreconditionFailed:
    if not tags:
        return PreconditionFailed(
            "If-Match holds no ETag, so the request was not executed. Send the ETag as you "
            'received it, with its quotation marks: If-Match: "3".'
        )
    if f"W/{etag}" in tags:
        return PreconditionFailed(
            "If-Match compares ETags strongly, and a weak ETag (W/) never matches, so the request "
            'was not executed. Send it without the W/, such as If-Match: "3". If you received it '
            "with the W/, a compressing proxy or middleware has added it."
        )
    return PreconditionFailed()


def is_conditional(request: Any) -> bool:
    """Whether a change has a condition."""
    return "If-Match" in request.headers or "If-None-Match" in request.headers


def run_conditionally(
    request: Any,
    find: Callable[[], Any],
    etag_of: Callable[[Any], str | None],
    run: Callable[[Any], HttpResponseBase],
    *,
    required: bool,
) -> HttpResponseBase:
    """Run the view under a lock of the object, if the request's conditions hold for that.

    Args:
        request: the request.
        find: looks for the object at the URL, for this caller; raises ``Http404`` if there is none.
        etag_of: the ETag of an object's state.
        run: the view, called with the locked object, or with ``None`` without conditions.
        required: whether a change must have ``If-Match``. Another condition says nothing of what
            the client has read.

    Raises:
        PreconditionRequired: the request needs a precondition.
        PreconditionFailed: a condition does not hold; nothing was executed.
        TransactionManagementError: the view reports a success, and has marked its transaction for
            rollback.
    """
    if request.method in _SAFE:
        return run(None)
    if required and "If-Match" not in request.headers:
        raise PreconditionRequired
    if not is_conditional(request):
        return run(None)
    obj = find()
    using = write_alias(obj)
    with in_transaction(using):
        if not lock(obj, using):
            raise Http404
        etag = etag_of(obj)
        if etag is None and required:
            raise ImproperlyConfigured(
                f"{type(obj).__name__} has no ETag, so no If-Match can hold. Give the model a "
                "VersionField, or make an ETag: get_etag(self, obj), or etag= of @preconditions."
            )
        compare(request.headers, etag)
        response = run(obj)
        if response.status_code < _ERRORS:
            refuse_marked(using, "The view")
        return response


def preconditions(
    find: Callable[..., Any],
    /,
    *,
    require: Collection[str] = CHANGES,
    etag: Callable[[Any], str | None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Execute a Django view only if ``If-Match`` and ``If-None-Match`` hold; send ETags.

    Put it directly on the view's function, below ``@idempotent`` if there is one.

    Args:
        find: called with what the view is called with; returns the object of a model at the URL, or
            raises ``Http404``. Let it find only what the caller may have.
        require: the methods that are refused (428) without ``If-Match``.
        etag: makes the ETag of an object, in its quotation marks; by default of its version, and of
            its primary key if that is not in the URL.

    Raises:
        ImproperlyConfigured: the view is async, or a decorator is below it.
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        _validate_view(view)

        @functools.wraps(view)
        def conditional(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            in_url = {*map(str, (*args, *kwargs.values()))}
            look_up = functools.partial(find, request, *args, **kwargs)

            def etag_of(obj: Any) -> str | None:
                if etag is None:
                    return version_etag(obj, named_by_key=str(obj.pk) in in_url)
                return checked_etag(etag(obj), "The etag= of @preconditions")

            def run(_locked: Any) -> HttpResponseBase:
                response: HttpResponseBase = view(request, *args, **kwargs)
                _tag(response, look_up, etag_of)
                return response

            required = request.method in require
            try:
                return run_conditionally(request, look_up, etag_of, run, required=required)
            except IdempotencyError as error:
                if error.foreign or getattr(request, "idempotency", None):
                    raise  # the claim's adapter rolls back and responds
                return problem_response(error)

        return conditional

    return decorate


def _validate_view(view: Callable[..., Any]) -> None:
    if is_marked(view, PROTECTED):
        raise ImproperlyConfigured(
            "@preconditions is above @idempotent, so a retry of a successful change would get 412 "
            "instead of its response. Put @preconditions below @idempotent."
        )
    if hasattr(view, "__wrapped__"):
        inner = inspect.unwrap(view)
        raise ImproperlyConfigured(
            f"@preconditions is above another decorator of {name_of(inner)}, which would "
            "not run before a replay. Put @preconditions on the function itself, below all others."
        )
    if iscoroutinefunction(view):
        raise ImproperlyConfigured(
            "@preconditions is on an async view, and Django has no transactions for async code. "
            "Use a plain view, or compare_and_swap() in the view."
        )


def _tag(
    response: HttpResponseBase, find: Callable[[], Any], etag_of: Callable[[Any], str | None]
) -> None:
    """Give the view's response the ETag of the object as it is afterwards."""
    if not 200 <= response.status_code < 300 or response.has_header("ETag"):
        return
    try:
        etag = etag_of(find())
    except Http404:
        return
    media_type, _parameters = parse_header_parameters(response.get("Content-Type", ""))
    set_etag(response, etag, media_type)
