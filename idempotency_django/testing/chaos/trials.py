"""The trials: what is done to the deliveries of a message, and what is counted afterwards."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final, Generic, TypeVar

from .boundaries import Blow, Strike
from .children import Child, Ended, outcome
from .report import Effects, Trial, counted, told
from .waits import end_waits, stuck

M = TypeVar("M")

_PAUSES: Final = (0.01, 1.0)
"""Seconds before the next delivery: the first time, and at most."""

_SHORTEST: Final = 0.25
_SLOWEST: Final = 3
"""A duplicate that takes so many times as long as an undisturbed delivery, and so many seconds at
least, waits for a process that is paused. Nothing but the length of a trial depends on it."""

_WORDS: Final = {Blow.KILL: "killed before", Blow.PAUSE: "paused before", Blow.LOSE: "no answer to"}


class _NothingWaits(Exception):
    """There is no lease that could be over."""


@dataclass
class Deliveries(Generic[M]):
    """Those of one message so far."""

    message: M
    count: int = 0
    kills: int = 0
    last: Ended = field(default_factory=Ended)

    def note(self, ended: Ended, strike: Strike | None = None) -> None:
        """One more has ended."""
        self.count += 1
        self.kills += bool(ended.struck) and strike is not None and strike.blow is Blow.KILL
        self.last = ended


@dataclass
class Trials(Generic[M]):
    """The trials of one handler.

    The arguments are those of :func:`~idempotency_django.testing.chaos.chaos`.
    """

    deliver: Callable[[M], object]
    message: Callable[[int], M]
    effects: Callable[[M], Effects]
    expected: Effects
    recover: Callable[[], object]
    kills: int
    attempts: int
    chance: random.Random
    boundaries: list[str] = field(default_factory=list)
    _patience: float = _SHORTEST
    _numbers: Iterator[int] = field(default_factory=count)

    def undisturbed(self) -> Trial:
        """Deliver a message that nothing happens to, and once more; learn the boundaries.

        The first one may find caches empty that are filled for all others.
        """
        before = stuck()
        for _ in range(2):
            delivered = self._new()
            started = time.monotonic()
            self._redeliver(delivered)
            self._patience = max(_SHORTEST, _SLOWEST * (time.monotonic() - started))
            self.boundaries = delivered.last.passed
            if delivered.last.acknowledged:
                self._redeliver(delivered)
        return self._trial(0, "undisturbed, twice", delivered, before)

    def struck(self, strike: Strike, number: int) -> list[Trial]:
        """Kill the first delivery, or lose an answer that it gets; deliver until acknowledged."""
        delivered, before = self._new(), stuck()
        with closing(self._child(delivered, strike)) as child:
            ended = child.wait()
        delivered.note(ended, strike)
        self._recover(delivered, kills=self.kills - 1)
        return [self._trial(number, _named(strike, ended), delivered, before)]

    def overtaken(self, strike: Strike, number: int) -> list[Trial]:
        """Pause the first delivery, and deliver a duplicate meanwhile; then let it go on.

        If the duplicate is refused because of a lease, the lease ends, and the duplicate comes
        again: the first delivery is late then.
        """
        delivered, before, late = self._new(), stuck(), False
        with (
            closing(self._child(delivered, strike)) as first,
            closing(first if not first.wait_for_pause() else self._child(delivered)) as second,
        ):
            if second is not first:
                ended = second.wait_for(self._patience)
                if ended is not None and not ended.acknowledged:
                    late = self._overtake(delivered)
                first.resume()
                delivered.note(second.wait())
            ended = first.wait()
            delivered.note(ended)
        self._recover(delivered)
        what = _named(strike, ended) + (", lease over" if late else "")
        return [self._trial(number, what, delivered, before)]

    def storm(self, messages: int, processes: int, number: int) -> list[Trial]:
        """Deliver several messages from several processes at once, each in an order of its own."""
        storm, before = [self._new() for _ in range(messages)], stuck()
        children = []
        try:
            for _ in range(processes):
                order = [delivered.message for delivered in storm]
                self.chance.shuffle(order)
                children.append(Child(partial(self._deliver_all, order), Strike(Blow.PAUSE, 0)))
            together = [child for child in children if child.wait_for_pause()]
            for child in together:
                child.resume()
            for child in children:
                child.wait()
        finally:
            for child in children:
                child.close()
        for delivered in storm:
            delivered.count += processes
            self._recover(delivered)
        what = f"{processes} times at once, in any order"
        trials = [self._trial(number, what, delivered, stuck()) for delivered in storm]
        return [*trials[:-1], replace(trials[-1], stuck=stuck() - before)]

    def _new(self) -> Deliveries[M]:
        message = self.message(next(self._numbers))
        effects = counted(self.effects(message))
        if any(effects.values()) if isinstance(effects, Mapping) else effects:
            raise ValueError(
                f"The message {message!r} has effects before its first delivery: {told(effects)}. "
                "Each trial needs a message of its own. Make another one for each number, such as "
                'Event(id=f"e-{number}", …), and count the effects of that message only.'
            )
        return Deliveries(message)

    def _child(self, delivered: Deliveries[M], strike: Strike | None = None) -> Child:
        return Child(partial(self.deliver, delivered.message), strike)

    def _recover(self, delivered: Deliveries[M], kills: int = 0) -> None:
        """Deliver until the message is acknowledged, once at least; kill the first of these."""
        pause, longest = _PAUSES
        for attempt in range(self.attempts):
            strike = None
            if attempt < kills:
                strike = Strike(Blow.KILL, self.chance.randrange(len(self.boundaries)))
            self._redeliver(delivered, strike)
            if delivered.last.acknowledged:
                return
            time.sleep(pause)  # a server may not have noticed yet that a process is dead
            pause = min(pause * 2, longest)

    def _redeliver(self, delivered: Deliveries[M], strike: Strike | None = None) -> None:
        end_waits()
        self.recover()
        with closing(self._child(delivered, strike)) as child:
            delivered.note(child.wait(), strike)

    def _overtake(self, delivered: Deliveries[M]) -> bool:
        """Deliver it with the lease over; whether it was acknowledged, and the owner is late."""
        with closing(Child(partial(self._deliver_late, delivered.message))) as child:
            ended = child.wait_for(self._patience)  # else it waits for a lock of the owner
        late = ended is not None and ended.acknowledged
        if late:
            delivered.note(child.wait())
        return late

    # These two run only in processes that are not measured.

    def _deliver_late(self, message: M) -> object:  # pragma: no cover
        if not end_waits():
            raise _NothingWaits
        return self.deliver(message)

    def _deliver_all(self, messages: list[M]) -> None:  # pragma: no cover
        for message in messages:
            outcome(partial(self.deliver, message))  # what was refused is delivered again later

    def _trial(
        self, number: int, what: str, delivered: Deliveries[M], before: Counter[str]
    ) -> Trial:
        return Trial(
            number=number,
            what=what,
            message=delivered.message,
            deliveries=delivered.count,
            kills=delivered.kills,
            effects=counted(self.effects(delivered.message)),
            expected=self.expected,
            error=delivered.last.error,
            stuck=stuck() - before,
        )


def _named(strike: Strike, ended: Ended) -> str:
    return f"{_WORDS[strike.blow]} {ended.struck or 'a boundary that it did not come to'}"
