"""Problems (RFC 9457) as REST framework's views answer them."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase
from rest_framework.exceptions import APIException

from ..errors import IdempotencyError
from ..http.messages import problem_of, status_of
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


def problem(view: Any, error: IdempotencyError) -> HttpResponseBase:
    """The problem as the project's exception handler renders it, or in its own media type."""
    response: HttpResponseBase = view.handle_exception(IdempotencyAPIException(error))
    if getattr(response, "data", None) != problem_of(error):
        return response
    return rendered_by(ProblemRenderer(), view, response)
