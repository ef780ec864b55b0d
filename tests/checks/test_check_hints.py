"""What the system checks suggest, and that each says a thing once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.test import override_settings
from rest_framework.views import APIView

from idempotency_django import checks
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.support.own_views import only_own_views

ACCEPTED = {"mode": "leased", "on_conflict": "accepted"}
MEMORY = {"default": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}}


@pytest.fixture(autouse=True)
def _own_views(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the views of the running test are views of the project."""
    only_own_views(monkeypatch, __name__)
    yield
    gc.collect()


def found(number: str, **idempotency: Any) -> list[CheckMessage]:
    """The messages with this id in a project with these settings."""
    with override_settings(IDEMPOTENCY=idempotency):
        messages = [*checks.check_settings(), *checks.check_stores(), *checks.check_views()]
    return [message for message in messages if message.id == f"idempotency_django.{number}"]


class TestHints:
    """What a hint offers in the place of a wrong name."""

    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            (
                {"tll": None},
                "IDEMPOTENCY['POLICY'] has no field 'tll'. Did you mean 'ttl'?",
            ),
            (
                {"on_conflicts": "wait", "retentoin": 1},
                (
                    "IDEMPOTENCY['POLICY'] has no field 'on_conflicts'. Did you mean "
                    "'on_conflict'? It has no field 'retentoin'. Did you mean 'retention'?"
                ),
            ),
        ],
    )
    def test_policy_field(self, policy: dict[str, Any], said: str) -> None:
        """E002 offers the policy field that was meant, and spares the reader the others."""
        (message,) = found("E002", POLICY=policy)
        assert message.msg == said

    def test_policy_field_like_no_other(self) -> None:
        """Where no field is meant for certain, all are listed."""
        (message,) = found("E002", POLICY={"zzz": 1})
        assert message.msg.startswith(
            "IDEMPOTENCY['POLICY'] has no field 'zzz'. Known names: check_replay,"
        )


class TestOnce:
    """A mistake that many views share is one message."""

    def test_of_many_views(self) -> None:
        """E020 is reported once, and names the first policies that ask for it."""
        made = [
            type(
                f"View{number}",
                (IdempotentViewMixin, APIView),
                {"idempotency_policy": Policy(**ACCEPTED), "__module__": __name__},
            )
            for number in range(5)
        ]
        (message,) = found("E020")
        assert message.hint == (
            f"Found in {__name__}.View0.idempotency_policy, "
            f"{__name__}.View1.idempotency_policy, {__name__}.View2.idempotency_policy "
            "and 2 more policies."
        )
        del made

    def test_of_the_project(self) -> None:
        """What is wrong with the project's policy is not reported of each view that inherits it."""
        made = [
            type(
                f"View{number}",
                (IdempotentViewMixin, APIView),
                {"idempotency_policy": Policy(required=True), "__module__": __name__},
            )
            for number in range(3)
        ]
        for number, idempotency in {
            "E020": {"POLICY": ACCEPTED},
            "E019": {"POLICY": {"mode": "transactional"}, "STORES": MEMORY},
        }.items():
            (message,) = found(number, **idempotency)
            assert message.hint == "Found in IDEMPOTENCY['POLICY']."
        del made

    def test_different_mistakes(self) -> None:
        """Two mistakes are two messages."""

        class Accepting(IdempotentViewMixin, APIView):
            idempotency_policy = Policy(mode="transactional", on_conflict="accepted")

        class Brief(IdempotentViewMixin, APIView):
            idempotency_policy = Policy(mode="leased", ttl=timedelta(seconds=1))

        hints = [str(message.hint) for message in found("E019")]
        assert len(hints) == 2
        assert "Accepting.idempotency_policy." in hints[0]
        assert "Brief.idempotency_policy." in hints[1]
        del Accepting, Brief
