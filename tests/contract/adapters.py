"""Every adapter as a table: what the promises that all of them make are tested over.

An adapter serves a piece of work, protected by a policy, at ``/job/``. The work gets the request
and a reference; it returns a :class:`Result` or a response of Django's, or it raises.
Each adapter says it in the words of its framework. All ask ``Gate`` for every request.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any, ClassVar

from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_http_methods
from ninja import NinjaAPI, Router, Schema, Status
from ninja.throttling import BaseThrottle as NinjaThrottle
from rest_framework import viewsets
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.ways import Base


@dataclass(frozen=True)
class Result:
    """What a piece of work returns."""

    status: int = 201
    headers: Mapping[str, str] = field(default_factory=dict)
    number: int = 0


Work = Callable[[Any, str], Any]


class Served:
    """What is served; not in a closure, where it would look like a view in a decorator."""

    work: ClassVar[list[Work]] = []


def do(request: Any, reference: str) -> Any:
    """Do the work that is served."""
    return Served.work[0](request, reference)


def make(request: Any, reference: str) -> Result:
    """Make an effect, and say how many there are."""
    Effect.objects.create(reference=reference)
    return Result(number=Effect.objects.count())


class Gate:
    """Who may come in now: a throttle, a permission or a decorator, as each framework has it."""

    is_open: ClassVar[bool] = True
    asked: ClassVar[int] = 0

    @classmethod
    def ask(cls) -> bool:
        """Whether a request may come in."""
        cls.asked += 1
        return cls.is_open


class DRFGate(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return Gate.ask()


class NinjaGate(NinjaThrottle):
    def allow_request(self, request: Any) -> bool:
        return Gate.ask()


# Views of Django.


def _in_django(request: HttpRequest) -> HttpResponse:
    response = do(request, json.loads(request.body)["reference"])
    if isinstance(response, Result):
        body = {"number": response.number}
        return JsonResponse(body, status=response.status, headers=response.headers)
    return response  # type: ignore[no-any-return]


def _gated(view: Any) -> Any:
    @functools.wraps(view)
    def gated(request: HttpRequest) -> Any:
        if not Gate.ask():
            raise PermissionDenied
        return view(request)

    return gated


def django(policy: Policy) -> Any:
    @require_http_methods(["POST", "PUT"])
    @_gated
    @idempotent(policy=policy)
    def view(request: HttpRequest) -> HttpResponse:
        return _in_django(request)

    return view


def django_async(policy: Policy) -> Any:
    @idempotent(policy=policy)
    async def view(request: HttpRequest) -> HttpResponse:
        return await sync_to_async(_in_django)(request)

    @require_http_methods(["POST", "PUT"])
    async def gated(request: HttpRequest) -> HttpResponse:
        if not Gate.ask():
            raise PermissionDenied
        return await view(request)

    return gated


# Views of REST framework.


class _Viewed(Base):
    throttle_classes: ClassVar[list[Any]] = [DRFGate]

    def post(self, request: Request) -> HttpResponse:
        response = do(request, request.data["reference"])
        if isinstance(response, Result):
            body = {"number": response.number}
            return Response(body, status=response.status, headers=dict(response.headers))
        return response  # type: ignore[no-any-return]


class _ViewSet(viewsets.ViewSet):
    authentication_classes = Base.authentication_classes
    throttle_classes = _Viewed.throttle_classes
    do = replace = _Viewed.post


def drf(policy: Policy) -> Any:
    bases = (IdempotentViewMixin, _Viewed)
    own = {"put": _Viewed.post, "idempotency_policy": policy}
    return type("View", bases, own).as_view()  # type: ignore[attr-defined]


def drf_action(policy: Policy) -> Any:
    """An action of a viewset with the mixin, and with policies by action."""
    own = {"idempotency_policies": {"do": policy, "replace": policy}}
    view = type("Viewed", (IdempotentViewMixin, _ViewSet), own)
    return view.as_view({"post": "do", "put": "replace"})  # type: ignore[attr-defined]


def drf_decorated(policy: Policy) -> Any:
    """An ``APIView`` with the decorator on its methods."""
    post = idempotent(policy=policy)(_Viewed.post)
    return type("View", (_Viewed,), {"post": post, "put": post}).as_view()  # type: ignore[attr-defined]


# Operations of django-ninja.

_numbers = count()


class Asked(Schema):
    reference: str


class Made(Schema):
    number: int


def _in_ninja(request: HttpRequest, asked: Asked, response: HttpResponse) -> Any:
    result = do(request, asked.reference)
    if isinstance(result, Result):
        for name, value in result.headers.items():
            response[name] = value
        return Status(result.status, {"number": result.number})
    return result


def _operation(router: Any, function: Any) -> None:
    statuses = {status.value: Made for status in HTTPStatus if status >= 200}
    options = {"response": statuses, "throttle": [NinjaGate()]}
    router.api_operation(["POST", "PUT"], "/", **options)(function)


def _served(router: Router | None, function: Any = None) -> Any:
    api = NinjaAPI(urls_namespace=f"adapters-{next(_numbers)}", openapi_url=None)
    if router is None:
        _operation(api, function)
    else:
        api.add_router("", router)
    [route] = [route for route in api.urls[0] if route.name != "api-root"]
    return route.callback


def _function(policy: Policy) -> Any:
    @idempotent(policy=policy)
    def operation(request: HttpRequest, asked: Asked, response: HttpResponse) -> Any:
        return _in_ninja(request, asked, response)

    return operation


def ninja(policy: Policy) -> Any:
    return _served(None, _function(policy))


def ninja_router(policy: Policy) -> Any:
    router = Router()
    _operation(router, _function(policy))
    return _served(router)


def ninja_async(policy: Policy) -> Any:
    @idempotent(policy=policy)
    async def operation(request: HttpRequest, asked: Asked, response: HttpResponse) -> Any:
        return await sync_to_async(_in_ninja)(request, asked, response)

    return _served(None, operation)


# The table.


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    Attributes:
        serve: makes the view with a policy.
        closed: the status of a response while the gate is closed.
        is_async: the view is async, so nothing is rolled back.
    """

    serve: Callable[[Policy], Any]
    closed: int
    is_async: bool = False


ADAPTERS: dict[str, Adapter] = {
    "django": Adapter(django, 403),
    "django-async": Adapter(django_async, 403, is_async=True),
    "drf": Adapter(drf, 429),
    "drf-action": Adapter(drf_action, 429),
    "drf-decorated": Adapter(drf_decorated, 429),
    "ninja": Adapter(ninja, 429),
    "ninja-async": Adapter(ninja_async, 429, is_async=True),
    "ninja-router": Adapter(ninja_router, 429),
}
