"""Stripe's webhooks, as https://docs.stripe.com/webhooks#verify-manually describes them."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from datetime import timedelta

from ....policy.canonical import canonical
from .base import (
    TOLERANCE,
    Contents,
    Headers,
    Secrets,
    Verifier,
    data_of,
    refuse_stale,
    seconds,
    text_at,
)

_HEADER = "Stripe-Signature"
_API_KEYS = ("sk_", "rk_", "pk_")


class Stripe(Verifier):
    """The signatures (``v1``) of Stripe, on snapshot events and on thin ones.

    Args:
        secrets: of the endpoint, as ``whsec_…``.
        tolerance: how long ago a delivery may have been signed, or how far in the future;
            ``None``: any time.
    """

    scheme = "Stripe"

    def __init__(self, secrets: Secrets, *, tolerance: timedelta | None = TOLERANCE) -> None:
        super().__init__(secrets)
        self._tolerance = tolerance

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for secret in self._usable():
            if secret.startswith(_API_KEYS):
                yield (
                    f"has an API key ({secret[:3]}…) in the place of a signing secret, so it "
                    "refuses each delivery; the secret of an endpoint begins with whsec_"
                )

    def verify(self, headers: Headers, body: bytes) -> None:
        pairs = [each.partition("=") for each in headers.get(_HEADER, "").split(",")]
        timestamp = next((value for name, _, value in pairs if name == "t"), "")
        refuse_stale(timestamp, self._tolerance)
        self._compare(
            [value for name, _, value in pairs if name == "v1"],
            lambda key: _signature(key, timestamp, body),
        )

    def read(self, headers: Headers, body: bytes) -> Contents:
        data = data_of(body)
        # How many other deliveries are pending is counted anew in each of them.
        event = {**data, "pending_webhooks": 0} if isinstance(data, dict) else data
        return Contents(text_at(data, "id"), text_at(data, "type"), data, canonical(event))

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        at = seconds(timestamp)
        return {_HEADER: f"t={at},v1={_signature(self._keys()[0], at, body)}"}


def _signature(key: bytes, timestamp: str, body: bytes) -> str:
    return hmac.digest(key, b"%s.%s" % (timestamp.encode(), body), "sha256").hex()
