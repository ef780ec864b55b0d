"""What runs until it is told to stop: the inbox, the relay and the transports."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from idempotency_django.management import stop_on_signals

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def before() -> Iterator[list[int]]:
    """The signals that came to the handlers of somebody else."""
    came: list[int] = []
    usual: dict[Any, Any] = {each: signal.getsignal(each) for each in SIGNALS}
    for each in SIGNALS:
        signal.signal(each, lambda number, _: came.append(number))
    yield came
    for each in SIGNALS:
        signal.signal(each, usual[each])


@pytest.mark.parametrize("number", SIGNALS)
def test_first_and_second(before: list[int], number: signal.Signals) -> None:
    """The first signal sets the event; the second one goes where it went before."""
    with stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert (stop.is_set(), before) == (True, [])
        signal.raise_signal(number)
        assert before == [number]


def test_afterwards(before: list[int]) -> None:
    """After the block, also one that raised, signals go where they went before."""
    with pytest.raises(ValueError, match="no more"), stop_on_signals() as stop:
        raise ValueError("no more")
    signal.raise_signal(signal.SIGTERM)
    assert (stop.is_set(), before) == (False, [signal.SIGTERM])


def test_as_it_begins(before: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes as soon as its handler is there is not lost."""
    install = signal.signal

    def struck(which: int, handler: Any) -> Any:
        usual = install(which, handler)
        if which == signal.SIGTERM:
            monkeypatch.setattr(signal, "signal", install)
            signal.raise_signal(which)
        return usual

    monkeypatch.setattr(signal, "signal", struck)
    with stop_on_signals() as stop:
        assert stop.is_set()
    assert before == []


@pytest.mark.parametrize("number", SIGNALS)
def test_ignored(before: list[int], number: signal.Signals) -> None:
    """A signal that is ignored, as Ctrl-C is in the background, stays so."""
    signal.signal(number, signal.SIG_IGN)
    with stop_on_signals() as stop:
        signal.raise_signal(number)
        assert not stop.is_set()


def test_other_threads(before: list[int]) -> None:
    """Signals are the main thread's: in another one, the event is set by somebody else."""
    given = threading.Event()
    seen: list[threading.Event] = []

    def run() -> None:
        with stop_on_signals(given) as stop:
            seen.append(stop)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [given]
    with stop_on_signals(given):
        signal.raise_signal(signal.SIGTERM)
    assert (given.is_set(), before) == (True, [])
