"""Keys, which name operations: parses the value of the client's header, or derives a key.

The header's value is a String of RFC 9651 (``"8e03978e"``, quoted) or the same key without quotes,
as Stripe's clients send it. Both forms name the same record.

A key callable takes an :class:`~idempotency_django.policy.invocation.Invocation` and returns the
key of a request whose client sent none, or ``None`` if it cannot derive one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Final

from http_sf import StructuredFieldError, parse

from ..errors import KeyGuessable, KeyMalformed
from .digests import canonical, digest
from .fingerprints import field_value
from .invocation import Form, Invocation

MAX_LENGTH: Final = 255
FORM_FIELD: Final = "idempotency_key"
"""The field of an HTML form that carries its key."""

# Attributes of key callables.
_FORM_FIELD_NAME: Final = "form_field"
_IGNORES_HEADER: Final = "ignores_header"

KeyFunction = Callable[[Invocation], str | None]

QUOTED_KEY: Final = re.compile(r'"([!#-+\--\[\]-~]{1,255})"')
"""The value of a key header as most clients send it: quoted, no comma, nothing to unescape."""
VALID: Final = re.compile(r"[\x21-\x7e]{1,255}")
"""A key that :func:`checked` lets pass."""
MADE_UP: Final = re.compile(r'"[1-9][0-9]{14,19}"')
"""The value of a key header that a browser may have made up.

Firefox can send a new one with each POST and PATCH, also of a form: 64 bits as a quoted number.
"""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")  # the result of fit()
_FORMATS: Final = {
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uuid7": re.compile(
        r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-7[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    ),
    "ulid": re.compile(r"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}"),
    "opaque": re.compile(r"[A-Za-z0-9_.~+/=-]{22,255}"),
}
FORMAT_NAMES: Final = frozenset(_FORMATS)


def parse_header(value: str) -> str:
    """The key in the value of the key header.

    Raises:
        KeyMalformed: it is neither one String of RFC 9651 nor one bare key, or it is not 1-255
            visible ASCII characters. A header that was sent twice arrives joined by a comma, and
            the two halves may look like one quoted string. Therefore no key in a header contains a
            comma.
    """
    value = value.strip(" \t")
    quoted = QUOTED_KEY.fullmatch(value)
    if quoted:
        return quoted[1]
    if not value.startswith('"'):
        return checked(_one_line(value, ',"'))
    try:
        parsed = parse(value.encode("ascii"), tltype="item")
    except (StructuredFieldError, UnicodeEncodeError) as error:
        raise KeyMalformed(
            f"The idempotency key is not one quoted string (RFC 9651): {error}. Check that the "
            "header is not sent twice. Send one line such as "
            '"8e03978e-40d5-43dd-bc93-6894a57f9324".'
        ) from None
    key = parsed[0] if isinstance(parsed, tuple) else parsed
    return checked(_one_line(key, ",") if isinstance(key, str) else "")


def _one_line(key: str, forbidden: str) -> str:
    """The key, unless a server may have joined it from two header lines: ``"abc`` and ``def"``."""
    if any(character in key for character in forbidden):
        raise KeyMalformed(
            "The idempotency key contains a comma or a quotation mark. Servers join repeated "
            "headers with a comma, so check that the header is not sent twice. Send one header "
            'line, quoted: "8e03978e-40d5-43dd-bc93-6894a57f9324".'
        )
    return key


def checked(key: str) -> str:
    """The same key, if it is valid.

    Raises:
        KeyMalformed: it is not 1-255 visible ASCII characters.
    """
    if not key:
        raise KeyMalformed("The idempotency key is empty. Send 1-255 visible ASCII characters.")
    if len(key) > MAX_LENGTH:
        raise KeyMalformed(
            f"The idempotency key is {len(key)} characters long; at most {MAX_LENGTH} are allowed."
        )
    if not VALID.fullmatch(key):
        raise KeyMalformed(
            "The idempotency key contains a character that is not visible ASCII (a space, a "
            "control character, an accent). Send 1-255 characters from ! to ~."
        )
    return key


def fit(identifier: str) -> str:
    """Any text as a valid key, for identifiers that others have chosen, such as a broker.

    A valid key is itself. Any other text becomes its SHA-256 digest, marked as such. Different
    texts never give the same key: a text that looks like such a digest is hashed as well.

    Raises:
        KeyMalformed: the text is empty, so it names nothing.
    """
    if not identifier or (VALID.fullmatch(identifier) and not _DIGEST.fullmatch(identifier)):
        return checked(identifier)
    return f"sha256:{digest(identifier)}"


def quoted(key: str) -> str:
    """The key as the value of the key header: a String of RFC 9651."""
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def has_format(key: str, expected: str) -> bool:
    """Whether the key has a named format (see ``FORMAT_NAMES``) or matches a regular expression."""
    return (_FORMATS.get(expected) or re.compile(expected)).fullmatch(key) is not None


def is_unguessable(key: str) -> bool:
    """Whether the key can hold 122 random bits: a UUID, a ULID, or 22 URL-safe characters."""
    return any(has_format(key, name) for name in _FORMATS)


def natural(path: str) -> KeyFunction:
    """The key is the value of a field of the body, for example an order number.

    Args:
        path: the field; ``"order.number"`` is a nested JSON field, and ``"items.0.id"`` is one of
            the first item of a list.
    """

    def natural_key(invocation: Invocation) -> str | None:
        value = field_value(invocation, path)
        usable = isinstance(value, str | int) and not isinstance(value, bool)
        return str(value) if usable and value != "" else None

    return natural_key


def form_field(name: str = FORM_FIELD) -> KeyFunction:
    """The key is in a field of the HTML form, where ``{% idempotency_key %}`` put it.

    It is a client's key, as a key in the header is: unauthenticated callers must send an
    unguessable key. The keys of the tag are unguessable.

    Args:
        name: the field.

    Raises:
        KeyGuessable: raised by the returned callable.
    """

    def form_field_key(invocation: Invocation) -> str | None:
        values = invocation.body.fields.get(name) if isinstance(invocation.body, Form) else None
        key = checked(values[-1]) if values and values[-1] else None
        if key is not None and not invocation.principal and not is_unguessable(key):
            raise KeyGuessable
        return key

    setattr(form_field_key, _FORM_FIELD_NAME, name)
    return form_field_key


def form_field_of(derive: KeyFunction | None) -> str:
    """The form field that a key callable reads, or an empty text if it reads none."""
    return getattr(derive, _FORM_FIELD_NAME, "")


def instead_of_header(derive: KeyFunction) -> KeyFunction:
    """The key is derived, and the key header counts for nothing: no caller can choose the key.

    Derive it from what the operation is, not from another header that the client chooses: a derived
    key is not refused for being guessable.

    Args:
        derive: derives the key, such as ``natural("event.id")``.

    Raises:
        ValueError: it is :func:`generated`, whose keys name no operation.
    """
    if derive is generated:
        raise ValueError(
            "keys.generated makes a new key for each request. Without the header, no retry could "
            "have the same key. Pass keys.generated alone, or derive the key from the request, "
            'such as keys.instead_of_header(keys.natural("event.id")).'
        )

    @wraps(derive)
    def key_instead(invocation: Invocation) -> str | None:
        return derive(invocation)

    setattr(key_instead, _IGNORES_HEADER, True)
    return key_instead


def reads_header(derive: KeyFunction | None) -> bool:
    """Whether the key header counts, alone or beside a key callable."""
    return not getattr(derive, _IGNORES_HEADER, False)


def deterministic(*paths: str) -> KeyFunction:
    """The key is a hash of fields of the body: the same values are the same operation.

    Choose fields that tell two wanted operations apart: with ``("customer", "amount")`` a customer
    could never pay the same amount twice while the record lives. A request that has none of the
    fields has no key.
    """
    if not paths:
        raise ValueError("keys.deterministic() needs the names of the fields to hash.")

    def deterministic_key(invocation: Invocation) -> str | None:
        values = [field_value(invocation, path) for path in paths]
        if all(value is None for value in values):
            return None
        return digest(invocation.name, canonical(values))

    return deterministic_key


def generated(invocation: Invocation) -> str:  # noqa: ARG001  # a key callable takes the call
    """A new key for each request without one; the response tells the client the key."""
    return str(uuid.uuid4())
