"""Our own tasks and views, killed and paused at every boundary on every database."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.decorators import idempotent
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.nightly import first_database
from tests.support.shared import new_key, post
from tests.testing.chaos.handlers import effects
from tests.testing.chaos.harness import Report, Service, chaos

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
]

app = Celery("chaos", broker="memory://", set_as_current=False, fixups=[])
app.conf.task_always_eager = app.conf.task_eager_propagates = True
provider = Service("provider")


@app.task(base=IdempotentTask, bind=True, idempotency_policy=Policy(mode="leased"))
def pay(self: IdempotentTask, reference: str) -> None:
    """Two steps, one of them elsewhere."""
    key = self.execution.derive_key("pay")
    self.execution.step("pay", lambda: provider.call(reference, key=key))
    self.execution.step("book", lambda: Effect.objects.create(reference=reference).pk)


@idempotent
def create(request: HttpRequest) -> HttpResponse:
    """One effect."""
    Effect.objects.create(reference=request.headers["Idempotency-Key"].strip('"'))
    return HttpResponse(status=201)


urlpatterns = [path("", create)]


@first_database("database")
def test_task(database: str, survives: Callable[[Report], None]) -> None:
    """A task whose message is delivered again has each of its steps once."""
    survives(
        chaos(
            lambda reference: pay.apply((reference,), task_id=reference).get(),
            lambda number: new_key(),
            lambda reference: {
                "payments": provider.effects(reference),
                "entries": effects(reference),
            },
            disturbances=["kill", "lose"],
        )
    )


@first_database("database")
def test_view(database: str, survives: Callable[[Report], None]) -> None:
    """A request that is sent again has its effect once."""
    survives(chaos(lambda key: post(Client(), "/", key), lambda number: new_key(), effects))
