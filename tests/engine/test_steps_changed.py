"""What the response says when an attempt finds other steps than are stored."""

from __future__ import annotations

from typing import ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support.shared import assert_problem, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Deployed:
    """The steps that the program has now."""

    steps: ClassVar[list[str]] = []


@idempotent(mode="leased")
def transfer(request: HttpRequest) -> HttpResponse:
    """Have an effect of its own before its steps, and fail after them."""
    Effect.objects.create(reference="a")
    for name in Deployed.steps:
        request.idempotency.step(name, lambda: None)  # type: ignore[attr-defined]
    if len(Deployed.steps) > 1:
        raise LookupError
    return HttpResponse(status=201)


urlpatterns = [path("transfers/", transfer)]


@pytest.mark.parametrize("now", ["withdraw", "credit", ""])
def test_says_what_was_executed(client: Client, now: str) -> None:
    """The attempt ran until then, and its response never says that nothing was executed."""
    client.raise_request_exception = False
    key = new_key()
    Deployed.steps = ["debit", "credit"]
    assert post(client, "/transfers/", key).status_code == 500
    Deployed.steps = [now] if now else []
    problem = assert_problem(post(client, "/transfers/", key), 500, "steps-changed")
    assert effects() == 2
    assert "The effects of both attempts stay" in problem["detail"]
