"""The stored form of responses."""

from __future__ import annotations

import pytest

from idempotency_django.stores.records import decode


@pytest.mark.parametrize("headers", ["", "{}", '"a"', "[1]", '[["a"]]', '[["a", 1]]'])
def test_what_nobody_wrote(headers: str) -> None:
    """What cannot have been written is refused, not guessed at."""
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or that of the headers
        decode(200, headers, b"")
