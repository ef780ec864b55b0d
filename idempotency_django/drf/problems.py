"""Problems (RFC 9457) as REST framework's views answer them."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase
from rest_framework.exceptions import APIException

from ..errors import IdempotencyError
from ..http.atomic_requests import RequestTransactions
from ..http.messages import problem_of, status_of
from ..http.serving import serve
from ..policy import Policy
from .adapter import DRFAdapter
from .responses import ProblemRenderer, rendered_by


class IdempotencyAPIException(APIException):
    """What a custom ``EXCEPTION_HANDLER`` sees of an :exc:`~.errors.IdempotencyError`.

    ``detail`` holds the members of the problem, and ``error`` the error itself. DRF's own handler
    turns ``wait`` into ``Retry-After``.
    """

    def __init__(self, error: IdempotencyError) -> None:
        super().__init__(error.detail, error.slug)
        self.error = error
        self.status_code = status_of(error)
        self.detail: Any = problem_of(error)
        self.wait = error.retry_after


def answer(
    adapter: DRFAdapter, policy: Policy, transactions: RequestTransactions | None
) -> HttpResponseBase:
    adapter.transactions = transactions
    adapter.policy = policy.resolved()
    try:
        return serve(adapter, adapter.policy, transactions)
    except IdempotencyError as error:
        if error.foreign:
            raise
        with adapter.apart():
            return problem(adapter.view, error)


def problem(view: Any, error: IdempotencyError) -> HttpResponseBase:
    """The problem as the project's exception handler renders it, or in its own media type."""
    response: HttpResponseBase = view.handle_exception(IdempotencyAPIException(error))
    if getattr(response, "data", None) != problem_of(error):
        return response
    return rendered_by(ProblemRenderer(), view, response)
