"""What an adapter says of its framework: how it runs a view, and what it makes of an error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from ..engine.context import ExecutionContext
from ..errors import IdempotencyError
from ..policy import Policy
from ..policy.invocation import Invocation
from ..stores.records import Record
from .invocations import invocation_of, key_header
from .problems import problem_response

if TYPE_CHECKING:
    from rest_framework.request import Request as _Request  # to a type checker, one of Django's
else:
    _Request = HttpRequest


class IdempotentRequest(_Request):
    """The request of a protected view, for type checkers; of Django and of REST framework.

    ::

        @idempotent(required=True, mode="leased")
        def pay(request: IdempotentRequest) -> HttpResponse:
            charge_id = request.idempotency.step("charge", charge)

    Attributes:
        idempotency: the attempt that runs. Without a key it is ``None``: where the policy does not
            require one, look first.
    """

    idempotency: ExecutionContext


class Adapter(ABC):
    """One request and its response, as an adapter's framework handles them.

    Attributes:
        http_request: Django's request.
        request: the request as the framework's own views know it.
        method: the request's method.
        run: runs the view.
        policy: the view's policy, resolved; it is known from :func:`~.serving.serve` on.
        response_class: makes the responses of this package, of the bytes, the status and the
            headers.
    """

    response_class: Callable[..., HttpResponse] = HttpResponse

    http_request: HttpRequest
    request: Any
    method: str
    run: Callable[[], Any]
    policy: Policy

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        return key_header(self.http_request)

    def invocation(self) -> Invocation:
        """The invocation that the request is, for its policy."""
        return invocation_of(self.http_request, self.policy)

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its response."""

    async def arespond(self) -> HttpResponseBase:
        """The same, of an async view."""
        raise NotImplementedError

    def pass_through(self) -> Any:
        """What the view returns to its framework, which nothing here touches; awaitable if it is
        async.
        """
        return self.run()

    @abstractmethod
    def recover(self, error: Exception) -> HttpResponseBase:
        """The response to the view's error, rendered or not; or raise the error again."""

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        """The response of a refusal."""
        return problem_response(error)

    def authorize(self, record: Record) -> None:
        """Raise to refuse a replay to a caller who would be refused with a new key."""
        check = self.policy.check_replay
        if check is not None:
            refuse_result(check(self.request, record), "check_replay of a policy")


def refuse_result(result: object, name: str) -> None:
    """Refuse a result of a replay check: ``False``, for example, would let everybody pass.

    Raises:
        TypeError: it returned something.
    """
    if result is not None:
        raise TypeError(
            f"The {name} returned {result!r}. It must return None, or raise PermissionDenied to "
            "refuse a replay."
        )
