"""What all verifiers have in common: secrets that rotate, and comparisons in constant time."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final

from ....errors import DeliveryMalformed, SignatureRefused

logger = logging.getLogger("idempotency_django")

Headers = Mapping[str, str]
"""The headers of a delivery; names are found in any case."""

Secrets = Sequence[str] | Callable[[], Sequence[str]]
"""The secrets that a sender may sign with, or a callable that reads them at each delivery."""

TOLERANCE: Final = timedelta(minutes=5)
"""How far the sender's clock and ours may be apart, with the time that a delivery takes."""

UNTYPED: Final = "message"
"""The type of a message that has none."""

_SECONDS: Final = re.compile(r"[0-9]{1,12}")
_TYPE: Final = re.compile(r"[\x20-\x7e]{1,255}")
_TEXT: Final = re.compile(r"[^\ud800-\udfff\x00]{1,1000}")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a verified delivery says.

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
                "The delivery has a valid signature, but no id that could be kept: 1 to 1000 "
                "characters of text."
            )
        if not _TYPE.fullmatch(self.type):
            raise DeliveryMalformed(
                "The delivery has a valid signature, but no type that could be kept: 1 to 255 "
                "printable ASCII characters."
            )


class Verifier(ABC):
    """Tells a sender's deliveries from everybody else's, and reads them.

    Nothing that a delivery contains makes it raise anything but the two errors of its methods.

    Args:
        secrets: the secrets that the sender may sign with. To rotate one, list the new and the old
            one until the sender has stopped using the old one. A callable is called for each
            delivery, for secrets that change while the process runs.

    Attributes:
        signs_id: whether the signature covers the id of the message. If it does not, whoever has
            seen one delivery can send it again under another id.
    """

    signs_id: bool = True
    scheme: ClassVar[str] = "the sender's scheme"

    def __init__(self, secrets: Secrets) -> None:
        if isinstance(secrets, str | bytes):
            raise TypeError(
                f"The secrets of {type(self).__name__} are one text. Give a list, such as "
                "secrets=[new, old]."
            )
        self._secrets = secrets

    @abstractmethod
    def verify(self, headers: Headers, body: bytes) -> None:
        """Let pass what was signed with one of the secrets, lately.

        Raises:
            SignatureRefused: it was not.
        """

    @abstractmethod
    def read(self, headers: Headers, body: bytes) -> Contents:
        """What a delivery says, without verifying it again.

        Raises:
            DeliveryMalformed: it has no id or no type.
        """

    @abstractmethod
    def sign(
        self, body: bytes, *, message_id: str = "", timestamp: float | None = None
    ) -> dict[str, str]:
        """The headers that the sender would send with this body, for tests.

        Args:
            body: the body.
            message_id: the id, where it is in a header.
            timestamp: when it is signed, in seconds since 1970; by default now.
        """

    def problems(self) -> Iterator[str]:
        """What is wrong with the configuration, for the system checks."""
        given = self._given()
        if not given:
            yield "has no secrets"
        elif not all(isinstance(secret, str) for secret in given):
            yield "has a secret that is not a text (str); it is not used"
        elif len(self._usable()) < len(given):
            yield "has an empty secret, which anybody could sign with; it is not used"

    def key_of(self, secret: str) -> bytes:
        """The key of the HMAC that a secret stands for.

        Raises:
            ValueError: it stands for none.
        """
        return secret.encode()

    def _given(self) -> Sequence[Any]:
        """What the project gives; one text in place of a list would be one secret a letter."""
        given: Any = self._secrets() if callable(self._secrets) else self._secrets
        return () if given is None or isinstance(given, str | bytes) else given

    def _usable(self) -> list[str]:
        """Those of the secrets that somebody can have chosen."""
        return [secret for secret in self._given() if isinstance(secret, str) and secret.strip()]

    def _keys(self) -> list[bytes]:
        """The keys that may have been used, the first one being the one to sign with."""
        keys = []
        for secret in self._usable():
            try:
                keys.append(self.key_of(secret))
            except ValueError:
                logger.exception("A secret of %s cannot be used.", type(self).__name__)
        if not keys:
            logger.error("%s has no usable secret, so it refuses everything.", type(self).__name__)
        return keys

    def _compare(self, candidates: Iterable[str], expected: Callable[[bytes], str]) -> None:
        """Refuse a delivery none of whose signatures is made with one of the keys.

        Args:
            candidates: the signatures that came with it.
            expected: the signature that a key makes.

        Raises:
            SignatureRefused: none is.
        """
        given = [candidate.encode("utf-8", "surrogatepass") for candidate in candidates]
        made = [expected(key).encode() for key in self._keys()]
        # All of them, so that the time says nothing of how far one of them matches.
        matches = [hmac.compare_digest(one, other) for one in made for other in given]
        if not any(matches):
            raise SignatureRefused(
                f"The delivery has no signature of {self.scheme} that was made with a secret of "
                "this receiver. Is it the secret of this endpoint, and is the body as it was sent?"
            )


def refuse_stale(timestamp: str, tolerance: timedelta | None) -> None:
    """Refuse what was signed too long ago, or too far in the future.

    Raises:
        SignatureRefused: it was, or the timestamp is none.
    """
    if not _SECONDS.fullmatch(timestamp):
        raise SignatureRefused(
            "The delivery has no timestamp in seconds since 1970. Is it signed, and as this "
            "receiver expects it?"
        )
    apart = abs(time.time() - int(timestamp))
    if tolerance is not None and apart > tolerance.total_seconds():
        raise SignatureRefused(
            f"The delivery was signed {apart:.0f} seconds away from now; at most "
            f"{tolerance.total_seconds():.0f} are allowed. Is it a replay, or is a clock wrong?"
        )


def seconds(timestamp: float | None) -> str:
    """A timestamp as senders write it; by default now."""
    return str(int(time.time() if timestamp is None else timestamp))


def data_of(body: bytes) -> Any:
    """What the JSON of a body says; the bytes if it is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def text_at(data: Any, path: str) -> str:
    """The text or number at a dotted path of a JSON object; empty if there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    if isinstance(data, int) and not isinstance(data, bool):
        return str(data) if abs(data) < 10**100 else ""
    return data if isinstance(data, str) else ""
