"""All that is stored is written and read by the codec: where it changes, no plaintext is left."""

from __future__ import annotations

import pytest

from idempotency_django.stores.codec import decode, decode_step, encode, encode_step
from idempotency_django.stores.records import Payload, Step


@pytest.mark.parametrize(
    "payload",
    [
        Payload(201, (("Location", "/é/1"), ("Link", "a"), ("Link", "b")), b"\x00\xff"),
        Payload(204, (), b""),
        Payload(200, ((":reason", "Fine"),), None),
    ],
)
def test_response(payload: Payload) -> None:
    """A response is read as it was written, to the byte; a body that was not kept stays none."""
    stored = encode(payload)
    assert decode(*stored) == payload
    assert decode(stored[0], stored[1].encode(), stored[2]) == payload


@pytest.mark.parametrize("headers", ["", "{}", '"a"', "[1]", '[["a"]]', '[["a", 1]]'])
def test_what_nobody_wrote(headers: str) -> None:
    """What cannot have been written is refused, not guessed at."""
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or that of the headers
        decode(200, headers, b"")


def test_step() -> None:
    """A recovery point is read as it was written."""
    step = Step(name="charge", attempt=2, result="[1, null]")
    assert decode_step(encode_step(step)) == step
