"""What a receiver of a signal meets in the database spoils nobody's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import path

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post, record
from tests.support.views import create

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("atomic"),
]


urlpatterns = [
    path("view/", idempotent(create)),
    path("leased/", idempotent(mode="leased")(create)),
]


def fails(**_: Any) -> None:
    """A receiver whose statement is refused."""
    effect = Effect.objects.create(reference="receiver")
    Effect(pk=effect.pk).save(force_insert=True)


def marks(**_: Any) -> None:
    """One that marks the transaction for rollback, or is in none."""
    try:
        with transaction.atomic(savepoint=False):
            fails()
    except IntegrityError:
        pass


@pytest.fixture(params=[fails, marks])
def _receivers(request: pytest.FixtureRequest) -> Iterator[None]:
    """A receiver of every signal that spoils what it is called in."""
    every = [each for each in vars(signals).values() if isinstance(each, signals.Signal)]
    for signal in every:
        signal.connect(request.param)
    yield
    for signal in every:
        signal.disconnect(request.param)


@pytest.mark.usefixtures("_receivers")
@pytest.mark.parametrize("url", ["/view/", "/leased/"])
class TestReceiver:
    """One that fails, in whichever way."""

    @pytest.fixture(autouse=True)
    def _skip_what_is_refused(self, url: str, atomic: bool) -> None:
        if atomic and url == "/leased/":
            pytest.skip("LEASED MODE NEEDS AUTOCOMMIT")

    def test_executed_and_replayed(self, client: Client, url: str) -> None:
        """``claimed``, ``completed`` and ``replayed``: one effect, and its response again."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects() == 1

    def test_failed(self, client: Client, url: str) -> None:
        """``failed``: the response is given and the key is free."""
        key = new_key()
        for _ in range(2):
            assert post(client, url, key, "503").status_code == 503
        assert record(key).status == "failed"


def test_receiver_of_claimed_writes(client: Client) -> None:
    """What a receiver of ``claimed`` writes is committed with the operation, and only with it."""

    def audit(**_: Any) -> None:
        Effect.objects.create(reference="audit")

    signals.claimed.connect(audit)
    try:
        post(client, "/view/", new_key(), "503")
        assert effects("audit") == 0
        post(client, "/view/", new_key())
        assert effects("audit") == 1
    finally:
        signals.claimed.disconnect(audit)
