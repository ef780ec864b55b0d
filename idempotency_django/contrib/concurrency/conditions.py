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
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import models, router, transaction
from django.http import Http404, HttpRequest, HttpResponseNotModified
from django.http.response import HttpResponseBase
from django.utils.http import parse_http_date_safe
from django.utils.translation import get_language

from ...errors import IdempotencyError, PreconditionFailed, PreconditionRequired
from ...http import PROTECTED, is_marked, name_of, problem_response
from ...policy import digest
from .locks import in_transaction, lock_row, refresh_in_place, refuse_marked, write_alias
from .versions import VersionField

SAFE: Final = frozenset({"GET", "HEAD"})
ANY: Final = "*"

_ETAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'  # section 8.8.3
_IS_ETAG: Final = re.compile(_ETAG)
# Anything between two tags: parsing is lenient, and only the tags count.
_ETAGS: Final = re.compile(rf"(?:^|(?<=[,\s])){_ETAG}")
_FORM: Final = re.compile(r';as=[0-9a-f]{8}"')


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditional headers of a request; ``None``: it has no such header."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Conditions:
        """The conditions of a request with these headers."""
        names = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since")
        return cls(*(headers.get(name) for name in names))

    def for_change(self) -> bool:
        """Whether a change is conditional."""
        given = (self.if_match, self.if_none_match, self.if_unmodified_since)
        return any(header is not None for header in given)

    def protects(self, *, creates: bool) -> bool:
        """Whether a change on these conditions overwrites nothing that the client has not read.

        A date does not: it has whole seconds, and what has changed within the last one is not
        told from what the client has read (RFC 9110, section 8.8.2.2).

        Args:
            creates: whether the request creates what is not there.
        """
        return self.if_match is not None or (creates and (self.if_none_match or "").strip() == ANY)


def evaluate(
    conditions: Conditions,
    etag: str | None,
    modified: float | None = None,
    *,
    exists: bool,
    safe: bool,
) -> bool:
    """Evaluate the conditions in the order of RFC 9110, section 13.2.2.

    Args:
        conditions: what the request asks for.
        etag: the current ETag, of the representation that a safe method would send, and of the
            resource's state for any other method; ``None``: it has none.
        modified: when it was last changed, in seconds since the epoch; ``None``: unknown,
            and conditions on dates are ignored.
        exists: whether there is anything at this URL now.
        safe: whether the request only reads.

    Returns:
        ``True``: go on. ``False``: the client has it already (304).

    Raises:
        PreconditionFailed: the request must not be executed.
    """
    if_match, if_none_match = conditions.if_match, conditions.if_none_match
    if not safe:  # it is about the state, whichever representation the client has read
        if_match, if_none_match = _without_form(if_match), _without_form(if_none_match)
    if if_match is not None:
        if not _matches(if_match, etag, exists=exists, strong=True):
            raise _failed(if_match, etag)
    elif not _unmodified(conditions.if_unmodified_since, modified):
        raise PreconditionFailed
    if if_none_match is not None:
        if not _matches(if_none_match, etag, exists=exists, strong=False):
            return True
        if safe:
            return False
        raise PreconditionFailed
    since = conditions.if_modified_since
    return not (safe and modified is not None and _date(since) and _unmodified(since, modified))


def equal_strongly(one: str, other: str) -> bool:
    """The strong comparison of two ETags (section 8.8.3.2): equal, and neither is weak."""
    return one == other and not one.startswith("W/")


def equal_weakly(one: str, other: str) -> bool:
    """The weak comparison of two ETags: equal, whether weak or not."""
    return one.removeprefix("W/") == other.removeprefix("W/")


def version_etag(obj: Any, *, named_by_key: bool = True) -> str | None:
    """The strong ETag of an object's version, ``"3"``; ``None``: it has no version.

    Args:
        obj: the object.
        named_by_key: whether the URL holds the object's primary key. If not, it may lead to another
            object later, so the ETag holds the key: ``"17.3"``.
    """
    if not isinstance(obj, models.Model):
        return None
    key = "" if named_by_key else f"{quote(str(obj.pk), safe='')}."
    for field in obj._meta.concrete_fields:
        if isinstance(field, VersionField):
            return f'"{key}{getattr(obj, field.attname)}"'
    return None


def representation_etag(etag: str | None, form: str) -> str | None:
    """The ETag of one representation, made of the ETag of the state that it shows.

    Args:
        etag: that of the state, which the usual form has in the project's own language.
        form: which representation it is, apart from its language; empty: the usual one.
    """
    language = get_language() or settings.LANGUAGE_CODE
    if etag is None or (not form and language == settings.LANGUAGE_CODE):
        return etag
    return f'{etag[:-1]};as={digest(form, language)[:8]}"'


def checked_etag(etag: str | None, source: str) -> str | None:
    """The ETag, if it is one.

    Raises:
        ImproperlyConfigured: it is not quoted, or holds a character that an ETag cannot hold.
    """
    if etag is None or _IS_ETAG.fullmatch(etag):
        return etag
    raise ImproperlyConfigured(
        f"{source} returned {etag!r}, which is not an ETag. Return it in quotation marks and "
        "without spaces: '\"3\"', or 'W/\"3\"' for a weak one."
    )


def _without_form(header: str | None) -> str | None:
    return None if header is None else _FORM.sub('"', header)


def _matches(header: str, etag: str | None, *, exists: bool, strong: bool) -> bool:
    if header.strip() == ANY:
        return exists
    if etag is None:
        return False
    compare = equal_strongly if strong else equal_weakly
    return any(compare(given, etag) for given in _ETAGS.findall(header))


def _failed(if_match: str, etag: str | None) -> PreconditionFailed:
    if etag is not None and any(equal_weakly(tag, etag) for tag in _ETAGS.findall(if_match)):
        return PreconditionFailed(
            "If-Match compares ETags strongly, and a weak ETag (W/) never matches, so the request "
            "was not executed. "
            + (
                "The ETag of this resource is weak: its server must send a strong ETag."
                if etag.startswith("W/")
                else 'Send it without the W/, such as If-Match: "3". If you received it with the '
                "W/, a compressing proxy or middleware has added it."
            )
        )
    if if_match.strip() == ANY or _ETAGS.search(if_match):
        return PreconditionFailed()
    return PreconditionFailed(
        "If-Match holds no ETag, so the request was not executed. Send the ETag as you received "
        'it, with its quotation marks: If-Match: "3".'
    )


def _unmodified(since: str | None, modified: float | None) -> bool:
    date = _date(since)
    return date is None or modified is None or int(modified) <= date


def _date(header: str | None) -> int | None:
    """The header's date; ``None``: it is missing, or malformed and therefore ignored."""
    return parse_http_date_safe(header) if header else None


CHANGES: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""The methods that change the resource at a URL."""

_ERRORS: Final = 400  # and above: the status of a response that tells of no success

Run = Callable[[], HttpResponseBase]

NOT_COMPARED: Final = object()


@dataclass
class Resource:
    """The object that a conditional request is about, and how its adapter finds and tags it.

    Attributes:
        request: the request.
        find: looks for the object at the URL, for this caller; ``None``, or Django's ``Http404``:
            there is none.
        etag: the ETag of an object's state.
        modified: when an object was last changed; ``None``: unknown.
        form: which representation the response shows; empty: the usual one.
        required: whether the request must be conditional.
        creates: whether a PUT creates what is not there.
        model: the model of what is created; ``None``: unknown.
        compared: the object that the conditions were compared with, locked; or ``None``.
    """

    request: Any
    find: Callable[[], Any]
    etag: Callable[[Any], str | None]
    modified: Callable[[Any], datetime | None]
    form: str
    required: bool
    creates: bool
    model: type[models.Model] | None = None
    compared: Any = NOT_COMPARED

    def __post_init__(self) -> None:
        self.method: str = self.request.method or ""
        self.conditions = Conditions.of(self.request.headers)
        self.creates = self.creates and self.method == "PUT"

    def shown_etag(self, obj: Any) -> str | None:
        """The ETag of the object's representation that the response shows."""
        return representation_etag(self.etag(obj), self.form)

    def holds(self, obj: Any) -> bool:
        """Whether the conditions hold for the object; ``False``: the client has it already.

        Raises:
            PreconditionFailed: they do not hold.
        """
        exists = obj is not None
        safe = self.method in SAFE
        etag_of = self.shown_etag if safe else self.etag
        etag = etag_of(obj) if exists else None
        modified = self.modified(obj) if exists else None
        seconds = modified.timestamp() if modified else None
        return evaluate(self.conditions, etag, seconds, exists=exists, safe=safe)

    def not_modified(self, obj: Any) -> HttpResponseBase:
        """The 304 that says that the client has the object already."""
        return with_etag(HttpResponseNotModified(), self.shown_etag(obj))


def with_etag(response: HttpResponseBase, etag: str | None) -> HttpResponseBase:
    """The response, with the ETag if there is one."""
    if etag is not None:
        response["ETag"] = etag
    return response


def run_conditionally(resource: Resource, run: Run) -> HttpResponseBase:
    """Run the view if the request's conditions hold.

    Raises:
        PreconditionRequired: the request needs a precondition.
        PreconditionFailed: a condition does not hold; nothing was executed.
        TransactionManagementError: the view reports a success, and has marked its transaction for
            rollback.
    """
    conditions = resource.conditions
    if resource.method in SAFE:
        if conditions != Conditions():
            obj = _found(resource)
            if not resource.holds(obj):
                return resource.not_modified(obj)
            resource.compared = obj
        return run()
    if resource.required and not conditions.protects(creates=resource.creates):
        raise PreconditionRequired
    if not conditions.for_change():
        return run()
    obj = _found(resource)
    if obj is None:
        return _create(resource, run)
    if not isinstance(obj, models.Model):  # nothing that could be locked
        resource.holds(obj)
        return run()
    using = write_alias(obj)
    # On SQLite, a transaction that began with a look could not write after another transaction.
    with in_transaction(using):
        fresh = lock_row(obj, using)
        if fresh is None:
            raise Http404
        refresh_in_place(obj, fresh, using)
        resource.holds(obj)
        resource.compared = obj
        return _committed(run, using)


def _committed(run: Run, using: str | None) -> HttpResponseBase:
    """The view's response; an error instead of a success whose changes would be rolled back."""
    response = run()
    if response.status_code < _ERRORS:
        refuse_marked(using, "The view")
    return response


def _found(resource: Resource) -> Any:
    try:
        return resource.find()
    except Http404:
        # Without the conditions it would be 404, and they do not change that (section 13.2.1).
        if not resource.creates:
            raise
        return None


def _create(resource: Resource, run: Run) -> HttpResponseBase:
    """Run a view that creates what is not there; of several at once, one does."""
    resource.holds(None)
    resource.compared = None
    using = router.db_for_write(resource.model) if resource.model else None
    try:
        with transaction.atomic(using=using):
            return _committed(run, using)
    except Exception:
        resource.compared = NOT_COMPARED
        if _found(resource) is None:
            raise
        raise PreconditionFailed from None  # it failed because another process has created it


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
        _validate_view(view)

        @functools.wraps(view)
        def conditional(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            accept = request.headers.get("Accept", "")  # by which the view may choose
            resource = Resource(
                request,
                functools.partial(find, request, *args, **kwargs),
                functools.partial(_etag, etag, {*map(str, (*args, *kwargs.values()))}),
                modified or (lambda _: None),
                form="" if accept == "*/*" else accept,
                required=request.method in require,
                creates=creates,
            )
            run = functools.partial(_tagged, resource, lambda: view(request, *args, **kwargs))
            try:
                return run_conditionally(resource, run)
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


def _etag(make: Callable[[Any], str | None] | None, in_url: set[str], obj: Any) -> str | None:
    if make is None:
        return version_etag(obj, named_by_key=str(getattr(obj, "pk", "")) in in_url)
    return checked_etag(make(obj), "The etag= of @preconditions")


def _tagged(resource: Resource, view: Run) -> HttpResponseBase:
    """The view's response with the ETag of the object as it is afterwards."""
    response = view()
    if not 200 <= response.status_code < 300 or response.has_header("ETag"):
        return response
    try:
        obj = resource.find()
    except Http404:
        return response
    return response if obj is None else with_etag(response, resource.shown_etag(obj))
