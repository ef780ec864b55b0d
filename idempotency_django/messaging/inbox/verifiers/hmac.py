"""A verifier for senders who sign with an HMAC in a way of their own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from datetime import timedelta
from typing import Final, Literal

from django.core.exceptions import ImproperlyConfigured

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

_DIGESTS: Final = ("sha1", "sha256", "sha384", "sha512")
_PART: Final = re.compile(r"(\{[^{}]*\})")


class Hmac(Verifier):
    """An HMAC in a header. ::

        Hmac([secret], header="X-Shopify-Hmac-Sha256", encoding="base64",
             id_header="X-Shopify-Webhook-Id", type_header="X-Shopify-Topic")

    Where neither ``id_header`` nor ``id_path`` is given, the digest of the body is the id: two
    messages with the same body are one.

    Args:
        secrets: as texts; their UTF-8 bytes are the keys.
        header: the header with the signature.
        prefix: what comes before the signature in its header, such as ``"sha256="``.
        encoding: of the signature.
        digest: the hash function: ``"sha1"``, ``"sha256"``, ``"sha384"`` or ``"sha512"``.
        signed: what is signed: a text with ``{body}``, and with ``{timestamp}`` and ``{id}`` where
            they are signed too, such as ``"v0:{timestamp}:{body}"``.
        timestamp_header: the header with the timestamp, in seconds since 1970.
        tolerance: how long ago the timestamp may be, or how far in the future; ``None``: any time.
        id_header: the header with the id of the message.
        id_path: the member of the JSON body with the id; ``"event.id"`` is a nested one.
        type_header: the header with the type.
        type_path: the member of the JSON body with the type.

    Raises:
        ImproperlyConfigured: the arguments contradict one another.
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        header: str,
        prefix: str = "",
        encoding: Literal["hex", "base64"] = "hex",
        digest: str = "sha256",
        signed: str = "{body}",
        timestamp_header: str = "",
        tolerance: timedelta | None = TOLERANCE,
        id_header: str = "",
        id_path: str = "",
        type_header: str = "",
        type_path: str = "",
    ) -> None:
        super().__init__(secrets)
        self.scheme = f"the header {header}"  # type: ignore[misc]  # of this sender
        self._header, self._prefix = header, prefix
        self._encoding, self._digest = encoding, digest
        self._signed = _PART.split(signed)
        self._timestamp_header, self._tolerance = timestamp_header, tolerance
        self._id_header, self._id_path = id_header, id_path
        self._type_header, self._type_path = type_header, type_path
        self.signs_id = "{id}" in self._signed or not id_header
        self._refuse_contradictions()

    def verify(self, headers: Headers, body: bytes) -> None:
        sent = headers.get(self._header, "")
        if self._timestamp_header:
            refuse_stale(headers.get(self._timestamp_header, ""), self._tolerance)
        signature = sent.removeprefix(self._prefix) if sent.startswith(self._prefix) else ""
        if self._encoding == "hex":
            signature = signature.lower()
        signed = self._content(
            headers.get(self._id_header, ""), headers.get(self._timestamp_header, ""), body
        )
        self._compare([signature], lambda key: self._signature(key, signed))

    def read(self, headers: Headers, body: bytes) -> Contents:
        data = data_of(body)
        if self._id_header or self._id_path:
            message_id = headers.get(self._id_header, "") or text_at(data, self._id_path)
        else:
            message_id = f"body:{hashlib.sha256(body).hexdigest()}"
        type = headers.get(self._type_header, "") or text_at(data, self._type_path)  # noqa: A001
        return Contents(message_id, type or UNTYPED, data)

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        at = seconds(timestamp)
        signature = self._signature(self._keys()[0], self._content(message_id, at, body))
        headers = {
            self._header: f"{self._prefix}{signature}",
            self._timestamp_header: at,
            self._id_header: message_id,
        }
        headers.pop("", None)
        return headers

    def _content(self, message_id: str, timestamp: str, body: bytes) -> bytes:
        values = {
            "{body}": body,
            "{id}": message_id.encode("utf-8", "surrogatepass"),
            "{timestamp}": timestamp.encode("utf-8", "surrogatepass"),
        }
        return b"".join(
            [values[part] if part in values else part.encode() for part in self._signed]
        )

    def _signature(self, key: bytes, signed: bytes) -> str:
        made = hmac.digest(key, signed, self._digest)
        return made.hex() if self._encoding == "hex" else base64.b64encode(made).decode()

    def _refuse_contradictions(self) -> None:
        unknown = {*self._signed[1::2]} - {"{body}", "{id}", "{timestamp}"}
        problems = {
            f"digest={self._digest!r}; it must be one of {', '.join(_DIGESTS)}": (
                self._digest not in _DIGESTS
            ),
            f"encoding={self._encoding!r}; it must be 'hex' or 'base64'": (
                self._encoding not in ("hex", "base64")
            ),
            f"signed= with {', '.join(sorted(unknown))}, which stands for nothing": bool(unknown),
            "signed= without {body}, so that anybody could change the body": (
                "{body}" not in self._signed
            ),
            "signed= with {timestamp}, but no timestamp_header": (
                "{timestamp}" in self._signed and not self._timestamp_header
            ),
            "timestamp_header, but a signed= without {timestamp}: anybody could change it": (
                bool(self._timestamp_header) and "{timestamp}" not in self._signed
            ),
            "signed= with {id}, but no id_header": "{id}" in self._signed and not self._id_header,
            "both id_header and id_path": bool(self._id_header and self._id_path),
            "both type_header and type_path": bool(self._type_header and self._type_path),
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ImproperlyConfigured(f"The verifier for {self.scheme} has {problem}.")
