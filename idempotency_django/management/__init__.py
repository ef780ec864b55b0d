"""What commands share: the type of an option, their graceful end, and what waits too long."""

from __future__ import annotations

import signal
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from .health import PURGE_AGE, Finding, Names, findings, overdue, register_health

__all__ = [
    "PURGE_AGE",
    "Finding",
    "Names",
    "findings",
    "number",
    "overdue",
    "register_health",
    "stop_on_signals",
]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_TOO_MUCH: Final = 1_000_000


def number(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Reads an option that is a number of this kind above 0."""

    def number(text: str) -> float:  # the name is in argparse's error for what is no number
        value = kind(text)
        if not 0 < value < _TOO_MUCH:
            raise ArgumentTypeError(f"{text!r} must be above 0 and below {_TOO_MUCH:,}.")
        return value

    return number


@contextmanager
def stop_on_signals(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event that the first SIGTERM or Ctrl-C sets; a second one ends the process as usual.

    A signal that is ignored stays so, as Ctrl-C is in the background. Signals are the main
    thread's: in another one, the event must be set by other means.

    Args:
        stop: the event to set; by default a new one.
    """
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # All of them are known before the first is replaced: a signal may come at once.
    known: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: how for number, how in known.items() if how is not signal.SIG_IGN}

    def note(number: int, _: object) -> None:
        signal.signal(number, before[number])
        stop.set()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, how in before.items():
            signal.signal(number, how)
