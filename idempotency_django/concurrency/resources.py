"""What a conditional request is about, and the order in which it is looked at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from django.db import models, router, transaction
from django.http import Http404
from django.http.response import HttpResponseBase

from ..errors import PreconditionFailed, PreconditionRequired
from .conditions import SAFE, Conditions, evaluate, representation_etag
from .locks import follow, in_transaction, locked, written_to
from .rollbacks import refuse_marked

CHANGES: Final = frozenset({"PUT", "PATCH", "DELETE"})
"""The methods that a resource's own URL is changed by."""

_ERRORS: Final = 400  # and above: the status of an answer that tells of no success

Run = Callable[[], HttpResponseBase]


class Resource(ABC):
    """What a request is about, as an adapter knows it.

    Attributes:
        method: the request's method.
        headers: the request's headers.
        conditions: the request's conditional headers.
        required: whether the request must be conditional.
        creates: whether a PUT creates what is not there.
        model: the model of what is created; ``None``: nobody knows.
    """

    def __init__(self, request: Any, *, required: bool, creates: bool = False) -> None:
        self.method = request.method or ""
        self.headers = request.headers
        self.conditions = Conditions.of(request.headers)
        self.required = required
        self.creates = creates and self.method == "PUT"
        self.model: type[models.Model] | None = None

    @abstractmethod
    def find(self) -> Any:
        """The object at the URL, for this caller; ``None``, or Django's ``Http404``: none."""

    @abstractmethod
    def etag(self, obj: Any) -> str | None:
        """The ETag of the object's state."""

    @abstractmethod
    def form(self) -> str:
        """Which representation the request is answered with; empty: the usual one."""

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

    def shown_etag(self, obj: Any) -> str | None:
        """The ETag of the object's representation that the request is answered with."""
        return representation_etag(self.etag(obj), self.form())

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


def run_conditionally(resource: Resource, run: Run) -> HttpResponseBase:
    """Run the view if the request's conditions hold.

    Raises:
        PreconditionRequired: the request must have a condition that says what it is meant for.
        PreconditionFailed: a condition does not hold; nothing was executed.
        TransactionManagementError: the view reports a success, and has marked its transaction for
            rollback.
    """
    if resource.method in SAFE:
        return _read(resource, run)
    if resource.required and not resource.conditions.protects(creates=resource.creates):
        raise PreconditionRequired
    if not resource.conditions.for_change():
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
        return _committed(run, using)


def _committed(run: Run, using: str | None) -> HttpResponseBase:
    """The view's answer; an error instead of a success whose changes would be rolled back."""
    response = run()
    if response.status_code < _ERRORS:
        refuse_marked(using, "The view")
    return response


def _read(resource: Resource, run: Run) -> HttpResponseBase:
    if resource.conditions != Conditions():
        obj = _found(resource)
        if not resource.holds(obj):
            return resource.not_modified(resource.shown_etag(obj))
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
            return _committed(run, using)
    except Exception:
        resource.forget()
        if _found(resource) is None:
            raise
        raise PreconditionFailed from None  # it failed because somebody else has created it
