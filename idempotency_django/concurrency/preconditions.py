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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import models, router, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from ..errors import IdempotencyError, PreconditionFailed, PreconditionRequired
from ..http.declared import is_marked
from ..http.inspection import held_as, name_of, vars_of
from ..http.messages import problem_response
from ..http.opening import PROTECTED, innermost, part_of_view
from .conditions import SAFE, Conditions, checked_etag, evaluate, version_etag
from .locks import follow, locked, written_to
from .versions import in_transaction

CHANGES: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""The methods that a resource's own URL is changed by."""

Run = Callable[[], HttpResponseBase]


class Resource(ABC):
    """What a request is about, as an adapter knows it.

    Attributes:
        method: the request's method.
        conditions: the request's conditional headers.
        required: whether the request must be conditional.
        creates: whether a PUT creates what is not there.
        model: the model of what is created; ``None``: nobody knows.
    """

    def __init__(self, request: Any, *, required: bool, creates: bool = False) -> None:
        self.method = request.method or ""
        self.conditions = Conditions.of(request.headers)
        self.required = required
        self.creates = creates and self.method == "PUT"
        self.model: type[models.Model] | None = None

    @abstractmethod
    def find(self) -> Any:
        """The object at the URL, for this caller; ``None``, or Django's ``Http404``: none."""

    @abstractmethod
    def etag(self, obj: Any) -> str | None:
        """The object's ETag."""

    @abstractmethod
    def modified(self, obj: Any) -> datetime | None:
        """When the object was last changed, if anybody knows."""

    def keep(self, obj: Any) -> None:
        """What the view is to find: the object, or ``None``."""

    def forget(self) -> None:
        """Let ``find()`` look again."""

    @abstractmethod
    def not_modified(self, etag: str | None) -> HttpResponseBase:
        """The 304."""

    def holds(self, obj: Any) -> bool:
        """Whether the conditions hold for the object; ``False``: the client has it already."""
        exists = obj is not None
        etag = self.etag(obj) if exists else None
        modified = self.modified(obj) if exists else None
        safe = self.method in SAFE
        seconds = modified.timestamp() if modified else None
        return evaluate(self.conditions, etag, seconds, exists=exists, safe=safe)


def run_conditionally(resource: Resource, run: Run) -> HttpResponseBase:
    """Run the view if the request's conditions hold.

    Raises:
        PreconditionRequired: the request has no condition, and must have one.
        PreconditionFailed: a condition does not hold; nothing was executed.
    """
    if resource.method in SAFE:
        return _read(resource, run)
    if not resource.conditions.for_change():
        if resource.required:
            raise PreconditionRequired
        return run()
    obj = _found(resource)
    if obj is None:
        return _create(resource, run)
    if not isinstance(obj, models.Model):  # nothing that could be locked
        resource.holds(obj)
        return run()
    using = written_to(obj)
    # On SQLite, a transaction that began with a look could not go on to write after somebody else.
    with in_transaction(using):
        fresh = locked(obj, using)
        if fresh is None:
            raise Http404
        follow(obj, fresh, using)
        resource.holds(obj)
        resource.keep(obj)
        return run()


def _read(resource: Resource, run: Run) -> HttpResponseBase:
    if resource.conditions != Conditions():
        obj = _found(resource)
        if not resource.holds(obj):
            return resource.not_modified(resource.etag(obj))
        resource.keep(obj)
    return run()


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
    resource.keep(None)
    using = router.db_for_write(resource.model) if resource.model else None
    try:
        with transaction.atomic(using=using):
            return run()
    except Exception:
        resource.forget()
        if _found(resource) is None:
            raise
        raise PreconditionFailed from None  # it failed because somebody else has created it


def preconditions(
    find: Callable[..., Any],
    /,
    *,
    require: Collection[str] = CHANGES,
    etag: Callable[[Any], str | None] = version_etag,
    modified: Callable[[Any], datetime | None] | None = None,
    creates: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Execute a Django view only if the request's conditional headers hold; send ETags.

    Put it directly on the view's function, below ``@idempotent`` if there is one.

    Args:
        find: called with what the view is called with; returns the object at the URL, or raises
            ``Http404``, or returns ``None``. Let it find only what the caller may have.
        require: the methods that are refused (428) without ``If-Match``.
        etag: makes the ETag of an object, in its quotation marks; by default of its version.
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
                etag,
                modified,
                required=request.method in require,
                creates=creates,
            )
            run = functools.partial(_with_etag, resource, lambda: view(request, *args, **kwargs))
            try:
                return run_conditionally(resource, run)
            except IdempotencyError as error:
                if error.foreign or getattr(request, "idempotency", None) is not None:
                    raise  # the claim's adapter rolls back and answers
                return problem_response(error)

        marked: Callable[..., Any] = part_of_view(conditional)
        return marked

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
    return response if obj is None else _tagged(response, resource.etag(obj))


def _tagged(response: HttpResponseBase, etag: str | None) -> HttpResponseBase:
    if etag is not None:
        response["ETag"] = etag
    return response
