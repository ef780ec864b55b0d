"""The mixin and the status view of REST framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ..errors import ResponseNotStored
from ..http.declared import checked, dotted_name, handlers_of, policy_of
from ..http.invocations import callers_of, key_header
from ..http.replays import check_object
from ..http.rule import problem_of_handler
from ..http.status import describe_operation, record_of
from ..http.wrapping import log_unclaimed, register_adapter, replace_handler
from ..policy import UNSAFE_METHODS, Policy
from ..stores.records import Record
from .adapter import DRFAdapter


class IdempotentViewMixin:  # see below
    # Described above: for a view without a docstring, OpenAPI generators would publish the
    # docstring of this base.

    idempotency_policy: ClassVar[Policy | None] = Policy()
    """The view's policy. With ``None``, the view is not protected."""

    idempotency_policies: ClassVar[Mapping[str, Policy | None]] = {}
    """Policies by action (viewsets) or lower-case method (other views); they come first."""

    idempotency_protected = "mixin"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if APIView in order and order.index(APIView) < order.index(IdempotentViewMixin):
            raise ImproperlyConfigured(
                f"{dotted_name(cls)} has IdempotentViewMixin after APIView in its bases, so it "
                f"would not be protected. Put the mixin first: class {cls.__name__}"
                "(IdempotentViewMixin, …)."
            )

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        if not issubclass(cls, APIView):
            raise ImproperlyConfigured(
                f"{dotted_name(cls)} has IdempotentViewMixin, but is no view of REST framework. "
                "Put @idempotent on its handlers, or let IdempotencyMiddleware protect it."
            )
        view = super().as_view(*args, **initkwargs)  # type: ignore[misc]
        for method, name in handlers_of(view).items():
            problem = problem_of_handler(cls, name)
            if problem and policy_of(view, method):
                raise ImproperlyConfigured(problem)
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response: HttpResponseBase = super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        if not hasattr(request, "idempotency"):
            log_unclaimed(type(self), request, response)
        return response

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        http_request: Any = request._request
        unsafe = http_request.method in UNSAFE_METHODS
        policy = checked(self.get_idempotency_policy(), type(self)) if unsafe else None
        if policy is None:
            http_request.idempotency = getattr(http_request, "idempotency", None)
        else:
            # dispatch() looks the handler up next. What it finds on the view itself runs after
            # everything that initial() checks, in subclasses too.
            replace_handler(self, request, policy)

    # For subclasses to override.

    def get_idempotency_policy(self) -> Policy | None:
        """The policy of this request; ``None``: the request is not protected."""
        view: Any = self
        name = getattr(view, "action", None) or view.request.method.lower()
        return self.idempotency_policies.get(name, self.idempotency_policy)

    def get_idempotency_key(self) -> str | None:
        """The key as the client sent it; ``None``: it sent none."""
        view: Any = self
        return key_header(view.request._request)

    def get_idempotency_scope(self) -> str | None:
        """The scope that the key is unique in; ``None``: the policy's."""
        return None

    def check_idempotent_replay(self, request: Request, record: Record) -> None:
        """Raise to refuse a replay to a caller whom the handler would refuse now.

        It is called before every replay, after everything that ``initial()`` checks. If the URL
        names an object, the default calls ``get_object()``: the object must be in the view's
        queryset, and its permissions are checked. An object that no longer exists is not a reason
        to refuse. A ``get_object()`` that takes arguments is not called.

        Raises:
            PermissionDenied: or ``Http404``, or any other exception. The caller gets the response
                that the project's exception handler makes of it.
        """
        check_object(self, record)

    def rebuild_idempotent_response(self, record: Record) -> HttpResponseBase:
        """The response of a record whose body was not kept, for example from the model's rows.

        Raises:
            ResponseNotStored: the default. The 409 says that the operation was executed.
        """
        raise ResponseNotStored


class IdempotencyStatusView(APIView):
    """The same as :class:`idempotency_django.http.views.IdempotencyStatusView`, for REST framework.

    It authenticates callers as the project's other views do. If the views that return 202 have
    other ``authentication_classes``, override them here.
    """

    def get(self, request: Request, token: str, *args: Any, **kwargs: Any) -> Response:
        """The status of an operation, and its response if there is one."""
        record = record_of(token, callers_of(request._request, request.user, request.auth))
        return Response(describe_operation(record), headers={"Cache-Control": "no-store"})


register_adapter(Request, DRFAdapter)
