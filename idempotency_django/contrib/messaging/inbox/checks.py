"""The system checks of the receivers of webhooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from ....engine import choose_mode
from ....policy import INHERITED
from ....stores import stores
from .receivers import WebhookReceiver, policy_of, receivers


def check_receivers(**_: Any) -> Sequence[CheckMessage]:
    """The receivers of webhooks that the URLs lead to."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    check_policy = _policy if _is_sound() else _nothing
    return [
        message
        for source, known in receivers().items()
        for message in (
            *_shared(source, known),
            *_verifier(known[-1]),
            *check_policy(known[-1]),
        )
    ]


def _is_sound() -> bool:
    """Whether the project's own policy and stores can be used; else, other checks say it once."""
    try:
        stores.all()
        policy = INHERITED.resolved()
        choose_mode(policy, stores[policy.store])
    except ImproperlyConfigured:
        return False
    return True


def _nothing(_: type[WebhookReceiver]) -> Iterator[CheckMessage]:
    return iter(())


def _shared(source: str, known: list[type[WebhookReceiver]]) -> Iterator[CheckMessage]:
    if len(known) > 1:
        names = " and ".join(each.__qualname__ for each in known)
        yield Error(
            f"{names} have the same source, {source!r}.",
            hint="Their messages cannot be distinguished. Give each receiver its own source.",
            id="idempotency_django.E041",
        )


def _verifier(receiver: type[WebhookReceiver]) -> Iterator[CheckMessage]:
    verifier = getattr(receiver, "verifier", None)
    problems = ["is missing"] if verifier is None else verifier.problems()
    for problem in problems:
        yield Error(
            f"The verifier of {receiver.__qualname__} {problem}.",
            hint="Pass the sender's signing secrets, such as Stripe([secret]).",
            id="idempotency_django.E041",
        )


def _policy(receiver: type[WebhookReceiver]) -> Iterator[CheckMessage]:
    try:
        policy = policy_of(receiver)
        choose_mode(policy, stores[policy.store])
    except ImproperlyConfigured as error:
        yield Error(
            f"The policy of {receiver.__qualname__} cannot be used: {error}",
            hint="Change its policy, or the project's.",
            id="idempotency_django.E041",
        )
