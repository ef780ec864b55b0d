"""Which thread a handler runs in: its steps keep their order in no other."""

from __future__ import annotations

import asyncio
import threading

from django.core.exceptions import ImproperlyConfigured


def handlers_thread() -> int | None:
    """The thread that runs the handler; ``None``: an event loop runs it, which orders its steps."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.get_ident()
    return None


def refuse_another(thread: int | None, name: str) -> None:
    """Refuse to begin a step in another thread than its handler's.

    Raises:
        ImproperlyConfigured: this is another one.
    """
    if thread not in (None, threading.get_ident()):
        raise ImproperlyConfigured(
            f"The step {name!r} was begun in another thread than its handler's. Threads may "
            "run in another order in the next attempt, which would then find its steps in "
            "another order. Begin steps in the handler's own thread, and use threads within "
            "a step."
        )
