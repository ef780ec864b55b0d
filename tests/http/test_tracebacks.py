"""The traceback of a view's own error shows the view, and little of ours."""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.support.shared import new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def fail() -> Any:
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise LookupError("boom") from error


def view(request: HttpRequest) -> HttpResponse:
    return fail()  # type: ignore[no-any-return]


async def aview(request: HttpRequest) -> HttpResponse:
    return fail()  # type: ignore[no-any-return]


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        return fail()  # type: ignore[no-any-return]


class LeasedDRF(DRF):
    idempotency_policy = Policy(mode="leased")


urlpatterns = [
    path("view/", idempotent(view)),
    path("leased/", idempotent(mode="leased")(view)),
    path("async/", idempotent(aview)),
    path("drf/", DRF.as_view()),
    path("leased-drf/", LeasedDRF.as_view()),
]


@pytest.mark.parametrize("url", ["/view/", "/leased/", "/async/", "/drf/", "/leased-drf/"])
def test_frames(client: Client, url: str) -> None:
    """At most five frames are ours; the view's frames and the cause stay."""
    with pytest.raises(LookupError) as caught:
        post(client, url, new_key())
    frames = traceback.extract_tb(caught.value.__traceback__)
    ours = [each for each in frames if "/idempotency_django/" in each.filename]
    assert len(ours) <= 5, ours
    assert frames[-1].name == "fail"
    assert frames[-2].filename == __file__
    assert isinstance(caught.value.__cause__, KeyError)
