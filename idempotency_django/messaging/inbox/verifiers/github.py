"""GitHub's webhooks, as https://docs.github.com/webhooks describes them."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from .base import Contents, Headers, Verifier, data_of

_HEADER = "X-Hub-Signature-256"
_FORM = "application/x-www-form-urlencoded"


class GitHub(Verifier):
    """The signature of GitHub, which covers the body and nothing else.

    It covers neither the id (``X-GitHub-Delivery``) nor the event (``X-GitHub-Event``), and has no
    timestamp. So the same body under another id is held for an operator.

    The type is the event, such as ``"push"``; the action is in the data.

    Args:
        secrets: of the webhook.
    """

    signs_id = False
    scheme = "GitHub"

    def verify(self, headers: Headers, body: bytes) -> None:
        self._compare([headers.get(_HEADER, "")], lambda key: _signature(key, body))

    def read(self, headers: Headers, body: bytes) -> Contents:
        form = headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        return Contents(
            headers.get("X-GitHub-Delivery", ""),
            headers.get("X-GitHub-Event", ""),
            data_of(_payload(body) if form else body),
        )

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        return {_HEADER: _signature(self._keys()[0], body), "X-GitHub-Delivery": message_id}


def _payload(body: bytes) -> bytes:
    """The JSON in a form; the whole body if it is none."""
    try:
        return parse_qs(body, max_num_fields=10)[b"payload"][0]
    except (ValueError, KeyError):
        return body


def _signature(key: bytes, body: bytes) -> str:
    return f"sha256={hmac.digest(key, body, 'sha256').hex()}"
