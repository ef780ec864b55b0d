"""What the system checks suggest."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.test import override_settings

from idempotency_django import checks


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
