"""An orderly end of what runs until it is told to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; a second one ends the process as usual."""
    stop, before = threading.Event(), dict[int, Any]()

    def note(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # no other gets signals
        for number in (signal.SIGTERM, signal.SIGINT):
            before[int(number)] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
