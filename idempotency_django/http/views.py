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
from ..logs import escaped
from ..policy import Policy, resolve
from ..records import Record
from .adapter import Adapter, shortened
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
        self.http_request = self.request = request
        self.method = request.method or ""
        self._view = view
        self._instance = instance

    def authorize(self, record: Record, policy: Policy) -> None:
        super().authorize(record, policy)
        if self._instance is not None:
            check_object(self._instance, record)

    def respond(self) -> HttpResponseBase:
        response = self._view()
        if not isinstance(response, HttpResponseBase):
            raise self._no_response(response)
        # A template is rendered here, inside the transaction, because what it says is stored.
        return response.render() if hasattr(response, "render") else response

    async def arespond(self) -> HttpResponseBase:
        response = await self._view()
        if not isinstance(response, HttpResponseBase):
            raise self._no_response(response)
        if not hasattr(response, "render"):
            return response
        return await sync_to_async(rendered)(response)

    def _no_response(self, response: object) -> TypeError:
        return TypeError(
            f"The view of {escaped(self.http_request.path)} returned {type(response).__name__}, "
            "not an HttpResponse."
        )

    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        if policy.store_errors and isinstance(error, _HTTP_ERRORS):
            return response_for_exception(self.http_request, error)
        raise error


def answer(
    policy: Policy,
    transactions: RequestTransactions | None,
    instance: Any,
    request: HttpRequest,
    run: Callable[[], Any],
) -> HttpResponseBase:
    """Serve the request; a refusal is a problem.

    Args:
        policy: the view's.
        transactions: what the adapter opened around the request.
        instance: the class-based view whose handler it is; ``None``: it is a function.
        request: the request.
        run: runs the view.
    """
    try:
        return serve(ViewAdapter(request, run, instance), resolve(policy), transactions)
    except IdempotencyError as error:
        if error.foreign:
            raise
        return problem_response(error)
    except Exception as error:  # noqa: BLE001  # the view's own, raised again
        raise shortened(error)  # noqa: B904  # its context is its own


async def aanswer(
    policy: Policy, instance: Any, request: HttpRequest, run: Callable[[], Any]
) -> HttpResponseBase:
    """:func:`answer` for an async view."""
    try:
        return await aserve(ViewAdapter(request, run, instance), resolve(policy))
    except IdempotencyError as error:
        if error.foreign:
            raise
        return problem_response(error)
    except Exception as error:  # noqa: BLE001  # the view's own, raised again
        raise shortened(error)  # noqa: B904  # its context is its own
