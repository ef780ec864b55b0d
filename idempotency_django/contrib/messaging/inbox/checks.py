"""The system check of the receivers of webhooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from .receivers import WebhookReceiver, receivers


def check_receivers(**_: Any) -> Sequence[CheckMessage]:
    """The receivers of webhooks that the URLs lead to."""
    return [
        Error(problem, hint=hint, id="idempotency_django.E041")
        for of_source in receivers().values()
        for problem, hint in _problems(of_source)
    ]


def _problems(of_source: Sequence[type[WebhookReceiver]]) -> Iterator[tuple[str, str]]:
    """The problems of the receivers of one source, each with what to do."""
    name, receiver = of_source[-1].__qualname__, of_source[-1]
    if len(of_source) > 1:
        names = " and ".join(each.__qualname__ for each in of_source)
        yield (
            f"{names} have the same source, {receiver.source!r}.",
            "Their messages cannot be distinguished. Give each receiver its own source.",
        )
    verifier = getattr(receiver, "verifier", None)
    for problem in ["is missing"] if verifier is None else verifier.problems():
        yield (
            f"The verifier of {name} {problem}.",
            "Pass the sender's signing secrets, such as Stripe([secret]).",
        )
    try:
        if receiver.policy is not None:  # else it is the project's, which other checks judge
            receiver.consumer.validate()
    except ImproperlyConfigured as error:
        yield (
            f"The policy of {name} cannot be used: {error}",
            "Change its policy.",
        )
