"""An HTTP request to a Django view: to a function, or to the handler of a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase

from ..errors import IdempotencyError
from ..policy import Policy
from ..records import Record
from .adapter import Adapter
from .atomic_requests import RequestTransactions
from .messages import problem_response, rendered
from .objects import check_object
from .serving import aserve, serve

_HTTP_ERRORS: Final = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class ViewAdapter(Adapter):
    """One request to a view that returns a response.

    Args:
        request: the request.
        view: runs the view.
        instance: the class-based view whose handler it is, where it is one.
    """

    def __init__(self, request: HttpRequest, view: Callable[[], Any], instance: Any = None) -> None:
        super().__init__(request)
        self._view = view
        self._instance = instance

    def authorize(self, record: Record, policy: Policy) -> None:
        super().authorize(record, policy)
        if self._instance is not None:
            check_object(self._instance, record)

    def respond(self) -> HttpResponseBase:
        # A template is rendered here, inside the transaction, because what it says is stored.
        return rendered(self._checked(self._view()))

    async def arespond(self) -> HttpResponseBase:
        response = self._checked(await self._view())
        if not hasattr(response, "render"):
            return response
        return await sync_to_async(rendered)(response)

    def _checked(self, response: Any) -> HttpResponseBase:
        if isinstance(response, HttpResponseBase):
            return response
        raise TypeError(
            f"The view of {self.http_request.path} returned {type(response).__name__}, "
            "not an HttpResponse."
        )

    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        if policy.store_errors and isinstance(error, _HTTP_ERRORS):
            return response_for_exception(self.http_request, error)
        raise error


def answer(
    adapter: Adapter, policy: Policy, transactions: RequestTransactions | None
) -> HttpResponseBase:
    """Serve the request; a refusal is a problem."""
    try:
        return serve(adapter, policy.resolved(), transactions)
    except IdempotencyError as error:
        if error.foreign:
            raise
        return problem_response(error)


async def aanswer(adapter: Adapter, policy: Policy) -> HttpResponseBase:
    """:func:`answer` for an async view."""
    try:
        return await aserve(adapter, policy.resolved())
    except IdempotencyError as error:
        if error.foreign:
            raise
        return problem_response(error)
