"""All trials of one handler."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction

from .boundaries import CALL, COMMIT, Blow, Strike
from .children import refuse_unfit
from .report import Effects, Report, Trial, counted
from .trials import Trials

M = TypeVar("M")

STORM: Final = "storm"
DISTURBANCES: Final = (*map(str, Blow), STORM)

_Case = Callable[[int], Sequence[Trial]]


def chaos(
    deliver: Callable[[M], object],
    message: Callable[[int], M],
    effects: Callable[[M], Effects],
    *,
    expected: Effects = 1,
    disturbances: Collection[str] = DISTURBANCES,
    kills: int = 1,
    messages: int = 6,
    duplicates: int = 3,
    limit: int | None = None,
    only: int | None = None,
    seed: int = 0,
    recover: Callable[[], object] = lambda: None,
    attempts: int = 10,
) -> Report:
    """Kill, pause, duplicate and reorder deliveries of messages, and count their effects. ::

        def test_billing(transactional_db):
            report = chaos(
                deliver=billing.handle,
                message=lambda number: Event(id=f"e-{number}", source="/shop", type="order.paid"),
                effects=lambda event: Entry.objects.filter(event=event.id).count(),
            )
            report.assert_passed()

    A delivery is a call of ``deliver`` in a process of its own. It has *boundaries*: before each
    statement and each commit, before each call of a :class:`Service`, at each :func:`crash_point`,
    and before the acknowledgement. First, a delivery that is not disturbed shows them. Then each
    trial has a message of its own and one disturbance:

    ``"kill"``
        The process is killed (SIGKILL) at a boundary. The message is delivered until it is
        acknowledged; leases are over by then, and messages that wait are due.
    ``"pause"``
        The process is paused at a boundary, and a duplicate is delivered meanwhile. If the
        duplicate is refused because of a lease, the lease ends and it is delivered again. Then the
        first process goes on.
    ``"lose"``
        A :class:`Service` does what it was asked for, and the caller gets a ``TimeoutError``; or
        the database commits, and the connection is lost before it says so.
    ``"storm"``
        Several messages are delivered by several processes at once, by each in another order.

    Args:
        deliver: delivers a message once, or calls a view. When it returns, the message is
            acknowledged. When it raises, or returns a response with a status of 400 or more, it is
            not, and is delivered again. It may be a coroutine function.
        message: makes the message of this number. It can write what the message is about.
        effects: counts what the message has done: how often, or how often each of several things.
        expected: what it should count.
        disturbances: some of ``"kill"``, ``"pause"``, ``"lose"`` and ``"storm"``.
        kills: how many deliveries of a message are killed. The second and later ones die at a
            random boundary.
        messages: how many messages are in the storm.
        duplicates: how many processes deliver each of them at once.
        limit: how many trials to make; they are chosen at random. By default all.
        only: make the trial of this number only.
        seed: what all chance comes from.
        recover: called before each further delivery, for example to end leases of your own.
        attempts: how many further deliveries a message has.

    Returns:
        What became of each message; ``str(report)`` is a table.

    Raises:
        ImproperlyConfigured: a transaction is open, a database is in memory, or the system has no
            ``os.fork()``.
        ValueError: a disturbance is unknown; there is no trial ``only``; or a new message already
            has effects.
        TypeError: ``effects`` returns something that is no count, such as a tuple.
    """
    for unknown in {*disturbances} - {*DISTURBANCES}:
        raise ValueError(
            f"There is no disturbance {unknown!r}. Choose from {', '.join(DISTURBANCES)}."
        )
    counted(expected, "expected= is")
    refuse_unfit()
    trials = Trials(
        deliver=async_to_sync(deliver) if iscoroutinefunction(deliver) else deliver,
        message=message,
        effects=effects,
        expected=expected,
        recover=recover,
        kills=kills,
        attempts=attempts,
        chance=random.Random(seed),  # noqa: S311  # nobody guesses it
    )
    ended = [trials.undisturbed()]
    if not ended[0].error:  # else there is nothing that could be disturbed
        cases = list(_cases(trials, disturbances, messages, duplicates))
        for number in _chosen(range(1, len(cases) + 1), limit, only, trials.chance):
            ended += cases[number - 1](number)
    return Report(trials.boundaries, ended, seed)


def _cases(
    trials: Trials[M], disturbances: Collection[str], messages: int, duplicates: int
) -> Iterator[_Case]:
    """Every trial there can be, in an order that depends on the boundaries only."""
    for number, what in enumerate(trials.boundaries):
        if Blow.KILL in disturbances:
            yield partial(trials.struck, Strike(Blow.KILL, number))
        if Blow.LOSE in disturbances and what.startswith((CALL, COMMIT)):
            yield partial(trials.struck, Strike(Blow.LOSE, number))
        if Blow.PAUSE in disturbances:
            yield partial(trials.overtaken, Strike(Blow.PAUSE, number))
    if STORM in disturbances:
        yield partial(trials.storm, messages, duplicates)


def _chosen(
    numbers: Sequence[int], limit: int | None, only: int | None, chance: random.Random
) -> Sequence[int]:
    if only is not None:
        if only not in {0, *numbers}:
            raise ValueError(
                f"There is no trial {only}: this handler has {len(numbers)} of them. Has it "
                "changed since? Run them all again."
            )
        return [only] if only else []
    if limit is not None and limit < len(numbers):
        return sorted(chance.sample(numbers, limit))
    return numbers
