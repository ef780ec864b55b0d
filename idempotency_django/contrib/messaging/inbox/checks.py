"""The system checks of the receivers of webhooks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004  # Django's name
)
from django.core.exceptions import ImproperlyConfigured

from ....conf import did_you_mean
from ....engine import choose_mode
from ....policy import INHERITED
from ....stores import stores
from .receivers import WebhookReceiver, policy_of, receivers

_READ: Final = {*WebhookReceiver.__annotations__, "group", "on_stored"} - {"_handlers"}
"""The names of attributes that a project can set on a receiver, or override."""


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
            *_misspelled(known[-1]),
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


def _misspelled(receiver: type[WebhookReceiver]) -> Iterator[CheckMessage]:
    """An attribute that nothing reads, and that looks like one that is read."""
    for name in dir(receiver):
        if name.startswith("_") or hasattr(WebhookReceiver, name) or name in _READ:
            continue
        close = difflib.get_close_matches(name, _READ, n=1)
        if close and abs(len(close[0]) - len(name)) < 2:  # a title is no ttl
            yield Warning(
                f"{receiver.__qualname__} has an attribute {name!r}, which has no effect.",
                hint=did_you_mean(name, _READ),
                id="idempotency_django.W037",
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
