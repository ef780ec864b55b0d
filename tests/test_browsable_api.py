"""The browsable API's forms send a key, so that they work where one is required."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, ClassVar

import pytest
from django.conf import settings as django_settings
from django.contrib.staticfiles import finders
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from rest_framework import renderers, viewsets

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.drf.forms import BrowsableAPIRenderer
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support import EffectSerializer, assert_problem, effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


REQUIRED = Policy(required={"POST", "PUT", "DELETE"})


class Effects(viewsets.ModelViewSet[Effect]):
    authentication_classes: ClassVar[list[Any]] = []
    queryset = Effect.objects.order_by("pk")
    serializer_class = EffectSerializer
    renderer_classes: ClassVar[list[Any]] = [
        renderers.JSONRenderer,
        renderers.BrowsableAPIRenderer,
    ]
    idempotency_policy = REQUIRED


class WithMixin(IdempotentViewMixin, Effects):
    idempotency_policy = REQUIRED


class WithRenderer(Effects):
    """Protected by the middleware, so that its pages are not of our making."""

    renderer_classes: ClassVar[list[Any]] = [renderers.JSONRenderer, BrowsableAPIRenderer]


class OwnRenderer(renderers.AdminRenderer):
    """A renderer of the project's."""


class Own(WithMixin):
    renderer_classes: ClassVar[list[Any]] = [renderers.JSONRenderer, OwnRenderer]


ACTIONS = {"get": "list", "post": "create"}
urlpatterns = [
    path("mixin/", WithMixin.as_view(ACTIONS)),
    path("renderer/", WithRenderer.as_view(ACTIONS)),
    path("own/", Own.as_view(ACTIONS)),
]


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [
        *django_settings.MIDDLEWARE,
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]


def key_of(page: HttpResponse) -> str:
    """The key in the page's form, which is the one for its scripts."""
    text = page.content.decode()
    (field,) = set(re.findall(r'name="idempotency_key" value="([^"]+)"', text))
    assert f'data-header="Idempotency-Key" data-key="{field}"' in text
    return field


@pytest.mark.parametrize("url", ["/mixin/", "/renderer/", "/own/"])
def test_form(url: str, client: Client) -> None:
    """A form that is submitted twice has one effect, and shows the same answer."""
    key = key_of(client.get(url, headers=BROWSER))
    filled = {"reference": "a", "idempotency_key": key}
    first = client.post(url, filled, headers=BROWSER)
    assert first.status_code in (201, 303)  # DRF's admin redirects
    again = client.post(url, filled, headers=BROWSER)
    assert is_replay(again)
    assert effects() == 1
    assert IdempotencyKey.objects.get().key == key


def test_form_of_a_browser_that_makes_keys_up(client: Client) -> None:
    """The key in the form comes before the one that the browser makes up for each click."""
    key = key_of(client.get("/mixin/", headers=BROWSER))
    filled = {"reference": "a", "idempotency_key": key}
    for made_up in ("17463529834658723465", "9346352983465872346"):
        headers = {**BROWSER, "Idempotency-Key": f'"{made_up}"'}
        last = client.post("/mixin/", filled, headers=headers)
    assert is_replay(last)
    assert effects() == 1


def test_next_page(client: Client) -> None:
    """The page that answers a form has a key of its own."""
    key = key_of(client.get("/mixin/", headers=BROWSER))
    filled = {"reference": "a", "idempotency_key": key}
    answer = client.post("/mixin/", filled, headers=BROWSER)
    following = key_of(answer)
    assert following != key
    client.post("/mixin/", {"reference": "a", "idempotency_key": following}, headers=BROWSER)
    assert effects() == 2


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        ({"reference": "a", "idempotency_key": new_key()}, {"Accept": "application/json"}),
        ({"reference": "a", "idempotency_key": ""}, BROWSER),
        ({"reference": "a"}, BROWSER),
    ],
)
def test_field_of_others(data: Any, headers: Any, client: Client) -> None:
    """The field counts in forms of the browsable API, and nowhere else."""
    assert_problem(client.post("/mixin/", data, headers=headers), 400, "key-missing")
    assert effects() == 0


def test_header_comes_first(client: Client) -> None:
    """Where a header brings a key, the field is like any other."""
    key = new_key()
    data = {"reference": "a", "idempotency_key": "another"}
    made = client.post("/mixin/", data, headers={**BROWSER, "Idempotency-Key": key})
    assert made.status_code == 201
    assert IdempotencyKey.objects.get().key == key


def test_json_in_a_browser(client: Client) -> None:
    """What is sent as raw data has its key in the header that the page's script adds."""
    key = key_of(client.get("/mixin/", headers=BROWSER))
    assert post(client, "/mixin/", key, headers=BROWSER).status_code == 201
    script = finders.find("idempotency_django/browsable_api.js")
    assert script is not None


def test_renderer_in_the_settings() -> None:
    """REST framework can import the renderer from its settings, before its own views."""
    code = """
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework",
                    "idempotency_django"],
    REST_FRAMEWORK={"DEFAULT_RENDERER_CLASSES": [
        "idempotency_django.drf.forms.BrowsableAPIRenderer"]},
)
django.setup()
from rest_framework.views import APIView
print(APIView.renderer_classes[0].__name__)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "BrowsableAPIRenderer\n", run.stderr
