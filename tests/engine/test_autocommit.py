"""Connections on which nothing commits by itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


def create(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return JsonResponse({}, status=201)


def leaves_it_off(request: HttpRequest) -> HttpResponse:
    """Commits by hand what it wants to, and leaves it to somebody else to tidy up."""
    reference = json.loads(request.body)["reference"]
    transaction.set_autocommit(False)
    Effect.objects.create(reference=reference)
    if reference == "commits":
        transaction.commit()
    if reference == "fails":
        raise InterruptedError
    return JsonResponse({}, status=201)


urlpatterns = [
    path("transactional/", idempotent(create)),
    path("leased/", idempotent(mode="leased")(create)),
    path("leaves/", idempotent(mode="leased")(leaves_it_off)),
]


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``AUTOCOMMIT`` is off in the settings."""
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
    connection.close()
    transaction.set_autocommit(False)
    yield
    transaction.rollback()
    connection.close()
    monkeypatch.undo()


@pytest.mark.usefixtures("off")
class TestSetting:
    """``AUTOCOMMIT: False``: no transaction of ours would ever be committed."""

    @pytest.mark.parametrize("atomic_requests", [True, False])
    @pytest.mark.parametrize("url", ["/transactional/", "/leased/"])
    def test_refused(
        self, client: Client, url: str, atomic_requests: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request with a key is refused where nothing would be committed."""
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic_requests)
        within = atomic_requests and url == "/leased/"
        told = "non_atomic_requests" if within else "AUTOCOMMIT"
        with pytest.raises(ImproperlyConfigured, match=told):
            post(client, url, new_key())
        assert effects() == 0


class TestLeftOff:
    """A leased view that leaves autocommit off."""

    @pytest.mark.parametrize("reference", ["commits", "leaves"])
    def test_completed(
        self, client: Client, reference: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What it has not committed is committed with its result, once, and the log says so."""
        key = new_key()
        with caplog.at_level(logging.WARNING, "idempotency_django"):
            first = post(client, "/leaves/", key, reference)
        assert "autocommit" in caplog.text
        assert record(key).status == "completed"
        assert_replays(first, post(client, "/leaves/", key, reference))
        assert effects(reference) == 1
        assert connection.get_autocommit()

    def test_failed(self, client: Client) -> None:
        """What it has not committed when it fails is rolled back, and its key is free."""
        key = new_key()
        for attempt in (1, 2):
            with pytest.raises(InterruptedError):
                post(client, "/leaves/", key, "fails")
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert effects("fails") == 0
