"""Middleware that looks at template responses and exceptions, around a protected view."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import effects, is_replay, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

OURS = "idempotency_django.middleware.IdempotencyMiddleware"

PAGE = "{{ title }} for {{ visitor|default:'nobody' }}"

seen: list[Any] = []


class Middleware:
    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)


class AddsContext(Middleware):
    """Adds to the context of every page, which each page of the project has."""

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        seen.append(type(response))
        response.context_data["visitor"] = "somebody"
        response["X-Page"] = "seen"
        return response


class Replaces(Middleware):
    """Makes another response of every page."""

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        seen.append(type(response))
        return SimpleTemplateResponse(engines["django"].from_string("replaced"))


class HandlesLookups(Middleware):
    """Turns an exception of the domain into a page."""

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        seen.append(error)
        return HttpResponse("handled", status=418) if isinstance(error, LookupError) else None


ERRORS: dict[str, tuple[type[Exception], int]] = {
    "missing": (Http404, 404),
    "denied": (PermissionDenied, 403),
    "suspicious": (SuspiciousOperation, 400),
    "lookup": (LookupError, 418),
    "value": (ValueError, 500),
}


def raising(request: HttpRequest, error: str) -> HttpResponse:
    Effect.objects.create(reference="a")
    raise ERRORS[error][0]


async def araising(request: HttpRequest, error: str) -> HttpResponse:
    raise ERRORS[error][0]


def page(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    template = engines["django"].from_string(PAGE)
    return TemplateResponse(request, template, {"title": "Done"}, content_type="text/plain")


urlpatterns = [
    path("sync/<error>/", csrf_exempt(raising)),
    path("async/<error>/", csrf_exempt(araising)),
    path("page/", csrf_exempt(page)),
    path("decorated-page/", csrf_exempt(idempotent(page))),
]


@pytest.fixture(autouse=True)
def _clear() -> None:
    seen.clear()


def use(settings: Any, *neighbours: type) -> None:
    paths = [f"{__name__}.{neighbour.__name__}" for neighbour in neighbours]
    settings.MIDDLEWARE = [*django_settings.MIDDLEWARE, *paths, OURS]


def send(url: str, key: str, *, under_asgi: bool) -> HttpResponse:
    headers = {"Idempotency-Key": key}
    if not under_asgi:
        return Client(raise_request_exception=False).post(url, headers=headers)

    async def go() -> HttpResponse:
        return await AsyncClient(raise_request_exception=False).post(url, headers=headers)

    return async_to_sync(go)()


class TestExceptions:
    """What a view raises, under the middleware."""

    @pytest.mark.parametrize("neighbour", [AddsContext, Replaces])
    @pytest.mark.parametrize("error", ERRORS)
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("under_asgi", [False, True])
    def test_error_is_not_a_page(
        self, settings: Any, *, neighbour: type, error: str, kind: str, under_asgi: bool
    ) -> None:
        """It becomes Django's response, as a ``process_exception`` makes it.

        A ``process_template_response`` may look at what stands for it. One that puts a page in its
        place does not hide the error.
        """
        use(settings, HandlesLookups, neighbour)
        key, url = new_key(), f"/{kind}/{error}/"
        for _ in range(2):
            response = send(url, key, under_asgi=under_asgi)
            unseen = neighbour is Replaces and error == "lookup"
            assert response.status_code == (500 if unseen else ERRORS[error][1])
            assert response.content
        errors = [type(one) for one in seen if isinstance(one, Exception)]
        # HandlesLookups saw each that was not replaced.
        assert errors == [ERRORS[error][0]] * (0 if neighbour is Replaces else 2)
        assert effects() == 0
        assert IdempotencyKey.objects.get().attempt == 2

    def test_order(self, settings: Any) -> None:
        """``process_exception`` of the middleware before ours is called."""
        use(settings, HandlesLookups)
        assert send("/sync/lookup/", new_key(), under_asgi=False).status_code == 418
        assert len(seen) == 1


class TestPages:
    """A template response of a protected view."""

    @pytest.mark.parametrize("url", ["/page/", "/decorated-page/"])
    @pytest.mark.parametrize("under_asgi", [False, True])
    def test_page_is_rendered_already(self, settings: Any, *, url: str, under_asgi: bool) -> None:
        """A hook sees the first response, rendered: its headers count, a change of context doesn't.

        What is stored is what the view made, so a replay has the same body, without the hook.
        """
        use(settings, AddsContext)
        key = new_key()
        first, second = (send(url, key, under_asgi=under_asgi) for _ in range(2))
        assert (first.status_code, is_replay(first)) == (200, False)
        assert is_replay(second)
        assert first.content == second.content == b"Done for nobody"
        assert seen == [TemplateResponse]
        assert (first.get("X-Page"), second.get("X-Page")) == ("seen", None)
        assert effects() == 1
