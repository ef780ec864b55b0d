"""A receiver whose processes are killed where a message says so, the first time it is handled."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path

from idempotency_django.backoff import Backoff
from idempotency_django.contrib.messaging import Event, StandardWebhooks, WebhookReceiver
from idempotency_django.contrib.messaging import inbox as processing
from tests.contrib.messaging.webhooks.site import SECRET
from tests.models import Effect

processing.BACKOFF = Backoff(timedelta(seconds=0.05), timedelta(hours=1))  # type: ignore[misc]  # nobody waits here for what recovers

MOMENTS = ("before the response", "before the effect", "before the commit")


def strike(moment: str, event: Event) -> None:
    """End as if the power had failed, if this is the moment, and the first time."""
    log = Path(os.environ["STRUCK"])
    struck = log.read_text().splitlines() if log.exists() else []
    if event.data.get("strike") == moment and f"{moment}: {event.id}" not in struck:
        die(moment, event)


def die(moment: str, event: Event) -> None:
    """Note it and end."""
    with Path(os.environ["STRUCK"]).open("a") as log:
        log.write(f"{moment}: {event.id}\n")
    os.kill(os.getpid(), signal.SIGKILL)


class Hook(WebhookReceiver):
    """The receiver."""

    source = "storm"
    verifier = StandardWebhooks([SECRET])
    max_attempts = int(os.environ.get("MAX_ATTEMPTS", "100"))

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        response = super().post(request, *args, **kwargs)
        if response.status_code == 200:
            contents = self.verifier.read(request.headers, request.body)
            event = Event(
                id=contents.message_id,
                source=self.source,
                type=contents.type,
                data=contents.data,
            )
            strike(MOMENTS[0], event)
        return response


@Hook.on("order.paid")
def paid(event: Event, execution: Any) -> None:
    """Make the effect, with strikes around it."""
    strike(MOMENTS[1], event)
    Effect.objects.create(reference=event.id)
    strike(MOMENTS[2], event)
    if event.data.get("kills"):
        die("poison", event)


urlpatterns = [path("hook/", Hook.as_view())]
