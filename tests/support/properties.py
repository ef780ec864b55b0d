"""What the property-based tests share: their profile, and the calls and JSON that they vary."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from idempotency_django.policy.invocation import Invocation

# A slow machine is no failure: no test has a deadline.
settings.register_profile("idempotency", deadline=None)
settings.load_profile("idempotency")

ANY_TEXT = st.text(st.characters(exclude_categories=[]))
"""Text with everything that Python's text can hold: NUL, newlines and lone surrogates too."""

VISIBLE_ASCII = st.characters(min_codepoint=0x21, max_codepoint=0x7E)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def a_call(body: Any = b"", **changes: Any) -> Invocation:
    """A call by user 42, whose body is JSON unless said otherwise."""
    given: dict[str, Any] = {
        "name": "POST /orders/",
        "principal": "user:42",
        "method": "POST",
        "path": "/orders/",
        "media_type": "application/json",
        "read": lambda: body,
    }
    return Invocation(**(given | changes))
