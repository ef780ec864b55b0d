"""The codec of everything that is stored to be read later: responses, steps and messages.

Every store, and every table of messages, writes its contents through this module and reads them
through it: a response's headers and body, a step's result, the payload and the headers
of an outbox message, the body and the headers of an inbox message or a dead letter, and the errors
of all of them. To encrypt or compress what is stored, change :func:`dump` and :func:`load`: a text
stays a text, and what was written before must still be read. To change responses only, change
:func:`encode` and :func:`decode`. All that a store looks for stays as it is: keys, scopes, paths,
principals, states, times, digests and the status code of a response. Debezium reads the outbox
without this module.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

from django.db import models

from .records import Payload, Step

Content = TypeVar("Content", str, bytes)


def dump(content: Content) -> Content:
    """The stored form of a text or of bytes: the content itself."""
    return content


def load(stored: Content) -> Content:
    """The text or the bytes that :func:`dump` was given."""
    return stored


def dump_text(text: str) -> str:
    """The stored form of a text. An empty text stays empty."""
    return text and dump(text)


def load_text(stored: str) -> str:
    """The text that :func:`dump_text` was given."""
    return stored and load(stored)


StoredPayload = tuple[int, str, bytes | None]
"""The stored form of a response.

Its status code; its headers, a JSON list of pairs; its bytes, or ``None`` if they are not kept.
"""


def encode(payload: Payload) -> StoredPayload:
    """The stored form of a response."""
    headers = dump(json.dumps(payload.headers)) if payload.headers else "[]"
    return payload.status, headers, None if payload.body is None else dump(payload.body)


def decode(status: int, headers: str | bytes, body: bytes | memoryview | None) -> Payload:
    """The response that was stored.

    Raises:
        ValueError: its headers are not what :func:`encode` writes.
    """
    text = headers.decode() if isinstance(headers, bytes) else headers
    pairs = [] if text == "[]" else json.loads(load(text))
    if not (isinstance(pairs, list) and all(map(_is_header, pairs))):
        raise ValueError("its headers are not pairs of strings")
    kept = None if body is None else load(bytes(body))
    return Payload(status, tuple((name, value) for name, value in pairs), kept)


def _is_header(pair: Any) -> bool:
    match pair:
        case [str(), str()]:
            return True
        case _:
            return False


def encode_step(step: Step) -> Step:
    """The stored form of a step."""
    return replace(step, result=dump_text(step.result))


def decode_step(stored: Step) -> Step:
    """The step that was stored."""
    return replace(stored, result=load_text(stored.result))


class StoredTextField(models.TextField):  # type: ignore[type-arg]  # not subscriptable at runtime
    """A column of text that is stored in the codec's form. It cannot be searched."""

    def get_prep_value(self, value: Any) -> Any:
        return dump_text(super().get_prep_value(value))

    def from_db_value(self, value: str, *_: object) -> str:
        """The text that was stored."""
        return load_text(value)

    def deconstruct(self) -> Any:
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.TextField", arguments, options


class StoredBinaryField(models.BinaryField):  # type: ignore[type-arg]  # likewise
    """A column of bytes that is stored in the codec's form. It cannot be searched."""

    def get_prep_value(self, value: Any) -> Any:
        return dump(bytes(super().get_prep_value(value)))

    def from_db_value(self, value: bytes | memoryview, *_: object) -> bytes:
        """The bytes that were stored."""
        return load(bytes(value))

    def deconstruct(self) -> Any:
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.BinaryField", arguments, options
