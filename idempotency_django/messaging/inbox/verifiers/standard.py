"""Standard Webhooks, as https://www.standardwebhooks.com specifies it; Svix sends the same."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from .base import (
    TOLERANCE,
    UNTYPED,
    Contents,
    Headers,
    Secrets,
    Verifier,
    data_of,
    refuse_stale,
    seconds,
    text_at,
)

_PREFIX = "whsec_"


class StandardWebhooks(Verifier):
    """The symmetric signatures (``v1``) of Standard Webhooks.

    Args:
        secrets: as ``whsec_…``, or the base64 text without that prefix.
        tolerance: how long ago a delivery may have been signed, or how far in the future;
            ``None``: any time.
        prefix: what the names of the three headers begin with; ``"svix-"`` for Svix.
    """

    scheme = "Standard Webhooks"

    def __init__(
        self,
        secrets: Secrets,
        *,
        tolerance: timedelta | None = TOLERANCE,
        prefix: str = "webhook-",
    ) -> None:
        super().__init__(secrets)
        self._tolerance = tolerance
        self._prefix = prefix

    def verify(self, headers: Headers, body: bytes) -> None:
        sent = headers.get(f"{self._prefix}signature", "").split(" ")
        versions = [each.partition(",") for each in sent]
        timestamp = headers.get(f"{self._prefix}timestamp", "")
        refuse_stale(timestamp, self._tolerance)
        signed = self._signed(headers.get(f"{self._prefix}id", ""), timestamp, body)
        self._compare(
            [signature for version, _, signature in versions if version == "v1"],
            partial(_signature, signed),
        )

    def read(self, headers: Headers, body: bytes) -> Contents:
        data = data_of(body)
        return Contents(
            headers.get(f"{self._prefix}id", ""), text_at(data, "type") or UNTYPED, data
        )

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        at = seconds(timestamp)
        signature = _signature(self._signed(message_id, at, body), self._keys()[0])
        values = {"id": message_id, "timestamp": at, "signature": f"v1,{signature}"}
        return {f"{self._prefix}{name}": value for name, value in values.items()}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for secret in self._usable():
            try:
                self.key_of(secret)
            except ValueError:
                yield "has a secret that is not base64; it is not used"

    def key_of(self, secret: str) -> bytes:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        if not key:
            raise ValueError("The secret is empty.")
        return key

    @staticmethod
    def _signed(message_id: str, timestamp: str, body: bytes) -> bytes:
        return b"%s.%s.%s" % (message_id.encode("utf-8", "surrogatepass"), timestamp.encode(), body)


def _signature(signed: bytes, key: bytes) -> str:
    return base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
