"""Verifiers: they authenticate a webhook, and read its id, type and data."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal
from urllib.parse import parse_qs

from django.core.exceptions import ImproperlyConfigured

from ...policy import canonical, fingerprints
from .errors import DeliveryMalformed, SignatureRefused
from .events import validate_nesting

__all__ = ["Contents", "GitHub", "Hmac", "StandardWebhooks", "Stripe", "Verifier"]

Headers = Mapping[str, str]
"""The headers of a delivery; names are found in any case."""

Secrets = Sequence[str] | Callable[[], Sequence[str]]
"""The valid secrets of a sender, or a callable that returns them for each delivery."""

TOLERANCE: Final = timedelta(minutes=5)
"""The largest difference between the timestamp and our clock, including the time of the
delivery.
"""

UNTYPED: Final = "message"
"""The type of a message that has none."""

_SECONDS: Final = re.compile(r"[0-9]{1,12}")
_TYPE: Final = re.compile(r"[\x20-\x7e]{1,255}")
_TEXT: Final = re.compile(r"[^\ud800-\udfff\x00]{1,1000}")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a verified delivery.

    Attributes:
        message_id: which message of its source it is.
        type: what happened, such as ``"invoice.paid"``.
        data: the whole body: what its JSON says, or the bytes if it is no JSON.
        same: what each delivery of the message has in common; by default the whole body.
    """

    message_id: str
    type: str
    data: Any
    same: bytes | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _TEXT.fullmatch(self.message_id):
            raise DeliveryMalformed(
                "The delivery has a valid signature, but no valid id (1 to 1000 characters), so "
                "nothing was stored. Check where the receiver's verifier looks for the id."
            )
        if not _TYPE.fullmatch(self.type):
            raise DeliveryMalformed(
                "The delivery has a valid signature, but no valid type (1 to 255 printable ASCII "
                "characters), so nothing was stored. Check where the receiver's verifier looks for "
                "the type."
            )


class Verifier(ABC):
    """Tells a sender's deliveries from everybody else's, and reads them.

    Nothing that a delivery contains makes it raise anything but the two errors of its methods.

    Args:
        secrets: the secrets that the sender may sign with. To rotate one, list the new and the old
            one until the sender has stopped using the old one. A callable is called for each
            delivery, for secrets that change while the process runs.

    Attributes:
        signs_id: whether the signature covers the id of the message. If it does not, a third party
            that has seen one delivery can send it again under another id.
    """

    signs_id: bool = True

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    @abstractmethod
    def verify(self, headers: Headers, body: bytes) -> None:
        """Let pass what was signed with one of the secrets, lately.

        Raises:
            SignatureRefused: it was not.
        """

    @abstractmethod
    def read(self, headers: Headers, body: bytes) -> Contents:
        """The contents of a delivery, without verifying it again.

        Raises:
            DeliveryMalformed: it has no id or no type.
        """

    def keys(self) -> list[bytes]:
        """The keys of the secrets, the first one being the one to sign with.

        Raises:
            ImproperlyConfigured: there is no secret, or one of them cannot be used.
        """
        secrets: Any = self._secrets() if callable(self._secrets) else self._secrets
        name = type(self).__name__
        if not secrets or not isinstance(secrets, list | tuple):  # of a text, they are letters
            raise ImproperlyConfigured(
                f"{name} has no list of secrets. Pass the sender's signing secrets, such as "
                f"{name}([new, old])."
            )
        try:
            return [self.key_of(secret) for secret in secrets]
        except ValueError as error:
            raise ImproperlyConfigured(
                f"{name} has a secret that cannot be used: {error}"
            ) from error

    def key_of(self, secret: str) -> bytes:
        """The key of the HMAC that a secret stands for.

        Raises:
            ValueError: it stands for none.
        """
        if not isinstance(secret, str) or not secret.strip():
            raise ValueError("it is empty, or is not a string")
        return secret.encode()


def refuse_stale(timestamp: str, tolerance: timedelta | None) -> None:
    """Refuse what was signed too long ago, or too far in the future.

    Raises:
        SignatureRefused: it was, or the timestamp is none.
    """
    if not _SECONDS.fullmatch(timestamp):
        raise SignatureRefused(
            "The delivery has no timestamp in seconds since 1970. Check that the sender signs in "
            "the scheme of this receiver."
        )
    apart = abs(time.time() - int(timestamp))
    if tolerance is not None and apart > tolerance.total_seconds():
        raise SignatureRefused(
            f"The timestamp of the signature is {apart:.0f} seconds from the current time; at most "
            f"{tolerance.total_seconds():.0f} are allowed. The delivery may be a replay, or a "
            "clock may be wrong."
        )


def data_of(body: bytes) -> Any:
    """The decoded JSON of a body; the bytes if it is not JSON, or is nested too deeply."""
    try:
        data = json.loads(body)
        validate_nesting("The body", data)
    except (ValueError, RecursionError):
        return body
    return data


def text_at(data: Any, path: str) -> str:
    """The string or number at a dotted path of a JSON object; empty if it is missing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    if isinstance(data, int) and not isinstance(data, bool):
        return str(data) if abs(data) < 10**100 else ""
    return data if isinstance(data, str) else ""


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

    _separator: ClassVar[str] = ""
    """What is between several signatures in the header; empty: it has one."""

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
        parts = sent.split(self._separator) if self._separator else [sent]
        timestamp = self._timestamp(headers)
        if self._timestamp_header:
            refuse_stale(timestamp, self._tolerance)
        signed = self._content(headers.get(self._id_header, ""), timestamp, body)
        signatures = [
            part.removeprefix(self._prefix) for part in parts if part.startswith(self._prefix)
        ]
        if self._encoding == "hex":
            signatures = [signature.lower() for signature in signatures]
        given = [signature.encode("utf-8", "surrogatepass") for signature in signatures]
        made = [self._signature(key, signed).encode() for key in self.keys()]
        # All of them, so that the time says nothing of how far one of them matches.
        matches = [hmac.compare_digest(one, other) for one in made for other in given]
        if not any(matches):
            raise SignatureRefused(
                f"The delivery has no signature in {self._header} that matches a secret of this "
                "receiver. Check the secret of this endpoint, and that no proxy changes the body."
            )

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
        """The headers that the sender would send with this body, for tests.

        Args:
            body: the body.
            message_id: the id, where it is in a header.
            timestamp: when it is signed, in seconds since 1970; by default now.
        """
        at = str(int(time.time() if timestamp is None else timestamp))
        signed = self._content(message_id, at, body)
        keys = self.keys() if self._separator else self.keys()[:1]
        signatures = [f"{self._prefix}{self._signature(key, signed)}" for key in keys]
        headers = {
            self._timestamp_header: at,
            self._id_header: message_id,
            self._header: self._separator.join(signatures),
        }
        headers.pop("", None)
        return headers

    def _timestamp(self, headers: Headers) -> str:
        return headers.get(self._timestamp_header, "")

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
            f"signed= with {', '.join(sorted(unknown))}, which is unknown": bool(unknown),
            "signed= without {body}, so the body would not be verified": (
                "{body}" not in self._signed
            ),
            "signed= with {timestamp}, but no timestamp_header": (
                "{timestamp}" in self._signed and not self._timestamp_header
            ),
            "timestamp_header, but signed= without {timestamp}, so the timestamp would not be "
            "verified": (bool(self._timestamp_header) and "{timestamp}" not in self._signed),
            "signed= with {id}, but no id_header": "{id}" in self._signed and not self._id_header,
            "both id_header and id_path": bool(self._id_header and self._id_path),
            "both type_header and type_path": bool(self._type_header and self._type_path),
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ImproperlyConfigured(f"The verifier for {self._header} has {problem}.")


class StandardWebhooks(Hmac):
    """The symmetric signatures (``v1``) of Standard Webhooks.

    Args:
        secrets: as ``whsec_…``, or the base64 text without that prefix.
        tolerance: how long ago a delivery may have been signed, or how far in the future;
            ``None``: any time.
        prefix: what the names of the three headers begin with; ``"svix-"`` for Svix.
    """

    _separator = " "

    def __init__(
        self,
        secrets: Secrets,
        *,
        tolerance: timedelta | None = TOLERANCE,
        prefix: str = "webhook-",
    ) -> None:
        super().__init__(
            secrets,
            header=f"{prefix}signature",
            prefix="v1,",
            encoding="base64",
            signed="{id}.{timestamp}.{body}",
            timestamp_header=f"{prefix}timestamp",
            tolerance=tolerance,
            id_header=f"{prefix}id",
            type_path="type",
        )

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        """The headers, with a signature by each secret and, by default, a new id."""
        message_id = message_id or f"msg_{uuid.uuid4().hex}"
        return super().sign(body, message_id=message_id, timestamp=timestamp)

    def key_of(self, secret: str) -> bytes:
        encoded = super().key_of(secret).removeprefix(b"whsec_")
        key = base64.b64decode(encoded, validate=True)
        if not key:
            raise ValueError("it is empty")
        return key


class Stripe(Hmac):
    """The signatures (``v1``) of Stripe, on snapshot events and on thin ones.

    Args:
        secrets: of the endpoint, as ``whsec_…``.
        tolerance: how long ago a delivery may have been signed, or how far in the future;
            ``None``: any time.
    """

    _separator = ","

    def __init__(self, secrets: Secrets, *, tolerance: timedelta | None = TOLERANCE) -> None:
        super().__init__(
            secrets,
            header="Stripe-Signature",
            prefix="v1=",
            signed="{timestamp}.{body}",
            timestamp_header="Stripe-Signature",  # it has both
            tolerance=tolerance,
            id_path="id",
            type_path="type",
        )

    def read(self, headers: Headers, body: bytes) -> Contents:
        contents = super().read(headers, body)
        # The number of other pending deliveries differs in each of them.
        return replace(contents, same=canonical({**contents.data, "pending_webhooks": 0}))

    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        at = time.time() if timestamp is None else timestamp
        [(header, signatures)] = super().sign(body, timestamp=at).items()
        return {header: f"t={int(at)},{signatures}"}

    def _timestamp(self, headers: Headers) -> str:
        parts = [each.partition("=") for each in headers.get(self._header, "").split(",")]
        return next((value for name, _, value in parts if name == "t"), "")


class GitHub(Hmac):
    """The signature of GitHub, which covers the body and nothing else.

    It covers neither the id (``X-GitHub-Delivery``) nor the event (``X-GitHub-Event``), and has no
    timestamp. So the same body under another id is refused.

    The type is the event, such as ``"push"``; the action is in the data.

    Args:
        secrets: of the webhook.
    """

    def __init__(self, secrets: Secrets) -> None:
        super().__init__(
            secrets,
            header="X-Hub-Signature-256",
            prefix="sha256=",
            id_header="X-GitHub-Delivery",
            type_header="X-GitHub-Event",
        )

    def read(self, headers: Headers, body: bytes) -> Contents:
        form = "application/x-www-form-urlencoded"
        if fingerprints.media_type_of(headers.get("Content-Type", "")) == form:
            with suppress(ValueError, KeyError):
                body = parse_qs(body, max_num_fields=10)[b"payload"][0]
        return super().read(headers, body)
