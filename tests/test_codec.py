"""How stores write answers and recovery points, and read them."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from idempotency_django.records import Payload, Step
from idempotency_django.stores.codec import decode, decode_step, encode, encode_step


@pytest.mark.parametrize(
    "payload",
    [
        Payload(201, (("Location", "/é/1"), ("Link", "a"), ("Link", "b")), b"\x00\xff"),
        Payload(204, (), b""),
        Payload(200, ((":reason", "Fine"),), None),
    ],
)
def test_answer(payload: Payload) -> None:
    """An answer is read as it was written, to the byte; a body that was not kept stays none."""
    stored = encode(payload)
    assert decode(*astuple(stored)) == payload
    assert decode(stored.status, stored.headers.encode(), stored.body) == payload


@pytest.mark.parametrize("headers", ["", "{}", '"a"', "[1]", '[["a"]]', '[["a", 1]]'])
def test_what_nobody_wrote(headers: str) -> None:
    """What cannot have been written is refused, not guessed at."""
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or that of the headers
        decode(200, headers, b"")


def test_step() -> None:
    """A recovery point is read as it was written, a failure as well."""
    for result, failure in (("[1, null]", ""), ("", '{"text": "no"}')):
        step = Step(position=1, name="charge", attempt=2, result=result, failure=failure)
        stored = encode_step(step)
        assert decode_step(1, "charge", 2, stored.result, stored.failure) == step
