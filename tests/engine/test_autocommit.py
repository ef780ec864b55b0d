"""Connections on which nothing commits by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support.shared import effects, new_key, post, record

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
    def test_refused(self, client: Client, reference: str) -> None:
        """Its result, which nothing would commit, is refused with what to do; and so is the effect
        that it has not committed. A retry finds the key in progress until the lease is over.
        """
        key = new_key()
        with pytest.raises(ImproperlyConfigured, match=r"The result of .*set_autocommit\(True\)"):
            post(client, "/leaves/", key, reference)
        connection.close_if_unusable_or_obsolete()  # as Django does when a request ends
        assert effects(reference) == (reference == "commits")
        assert record(key).status == "in_progress"

    def test_failed(self, client: Client) -> None:
        """Its error is the one that is told."""
        key = new_key()
        with pytest.raises(InterruptedError):
            post(client, "/leaves/", key, "fails")
        connection.close_if_unusable_or_obsolete()
        assert effects("fails") == 0
