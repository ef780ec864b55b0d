"""One flow for sync and async callers: a coroutine that awaits nothing but its driver.

A flow is written once. The driver of a sync caller blocks and never suspends, so that
:func:`finish` gets the result at once; that of an async caller awaits.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def finish(flow: Coroutine[Any, Any, T]) -> T:
    """The result of a flow whose driver blocks."""
    try:
        flow.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError
