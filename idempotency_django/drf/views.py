"""The mixin of REST framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.views import APIView

from ..http.declared import checked, dotted_name, handlers_of, policy_of
from ..http.replays import check_object
from ..http.rule import objection_to_handler
from ..http.wrapping import adapters, log_unclaimed, replace_handler
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
            problem = objection_to_handler(cls, name)
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


adapters.append((Request, DRFAdapter))
