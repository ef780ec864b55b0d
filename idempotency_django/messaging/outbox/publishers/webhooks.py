"""Where webhooks are sent to, and how they are signed: Standard Webhooks 1.0."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

PREFIX: Final = "whsec_"
"""What a secret of Standard Webhooks begins with; Base64 follows."""

SHORTEST: Final = 24
LONGEST: Final = 64
"""Bytes of a secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Who gets a webhook.

    Attributes:
        url: where it is sent to.
        secrets: what it is signed with, such as ``["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]``. It
            has one signature by each: while a secret is replaced, the new one and the old one.
        headers: further headers, for example of the receiver's own authentication.

    Raises:
        ValueError: a secret or the URL cannot be used.
    """

    url: str
    secrets: Sequence[str] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.url, str) and urlsplit(self.url).hostname):
            raise ValueError(f"the URL {self.url!r} has no host. Write 'https://host/path'")
        if isinstance(self.secrets, str) or not self.secrets:
            raise ValueError(
                "there is no list of secrets, so the receiver could not tell the webhooks from "
                "forged ones. Give one secret or more"
            )
        for place, secret in enumerate(self.secrets):
            _key(secret, place)

    def signed(self, message_id: str, body: bytes) -> dict[str, str]:
        """The headers that say what the message is, when it was sent, and by whom.

        Args:
            message_id: the same on every attempt.
            body: what is sent.
        """
        timestamp = str(int(time.time()))
        signed = f"{message_id}.{timestamp}.".encode() + body
        digests = (
            hmac.new(_key(secret, place), signed, hashlib.sha256).digest()
            for place, secret in enumerate(self.secrets)
        )
        return {
            "webhook-id": message_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(
                f"v1,{base64.b64encode(digest).decode()}" for digest in digests
            ),
        }


def _key(secret: str, place: int) -> bytes:
    """The bytes of a secret; an error names its place, and never the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (AttributeError, TypeError, ValueError, binascii.Error):
        key = b""
    if SHORTEST <= len(key) <= LONGEST:
        return key
    raise ValueError(
        f"its secret number {place + 1} is not a secret of Standard Webhooks: {PREFIX!r}, and then "
        f'{SHORTEST} to {LONGEST} random bytes in Base64. Make one by python -c "import base64, '
        f"secrets; print('{PREFIX}' + base64.b64encode(secrets.token_bytes(32)).decode())\""
    )
