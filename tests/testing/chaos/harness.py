"""What becomes of a message when the process that handles it is killed, at each point.

:func:`chaos` kills, pauses, duplicates and reorders deliveries to a handler, a view or a task on
real databases, and counts the effects of each message. It makes processes with ``os.fork()``.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from unittest.mock import patch
from uuid import uuid4
from weakref import finalize

from django.apps import apps
from django.db import OperationalError, connections
from django.db.backends.utils import CursorWrapper
from django.db.models import Count, QuerySet

from idempotency_django.contrib.messaging.databases import database
from idempotency_django.models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from idempotency_django.stores import Status, stores

M = TypeVar("M")
Effects = int | Mapping[str, int]

KILL, PAUSE, LOSE, STORM = DISTURBANCES = ("kill", "pause", "lose", "storm")

# The boundaries of a process: between what comes back from a server and what is sent next.

ACKNOWLEDGEMENT: Final = "the acknowledgement"
"""The last boundary: the handler has returned, and its caller does not know it yet."""

CALL: Final = "the call of "
COMMIT: Final = "COMMIT"
"""The prefixes of boundaries whose response can be lost."""

SHOWN: Final = 60  # characters of a statement
HEARTBEAT: Final = "idempotency-heartbeat"
"""The beginning of the names of the threads that renew leases, whenever they are due."""


@dataclass(frozen=True)
class Strike:
    """A disturbance of a process at the boundary of that number."""

    how: str
    number: int


class Boundaries:
    """Counts what this process passes, and strikes it at one of them.

    A lease is renewed whenever it is due, so that counts as nothing.

    Args:
        strike: what is to happen, and at which boundary.
        tell: called with what a process comes to before it is killed or paused there.
    """

    def __init__(self, strike: Strike | None = None, tell: Callable[[str], object] = len) -> None:
        self.passed: list[str] = []
        self._strike = strike
        self._tell = tell
        self._lock = threading.Lock()
        self._connecting = threading.local()

    def before(self, what: str) -> bool:
        """Pass the boundary before something; whether its response gets lost."""
        quiet = getattr(self._connecting, "now", False)
        if quiet or threading.current_thread().name.startswith(HEARTBEAT):
            return False
        with self._lock:
            strike = self._strike
            is_hit = strike is not None and strike.number == len(self.passed)
            self.passed.append(what)
            if strike is None or not is_hit:
                return False
            self._tell(what)
            if strike.how != LOSE:
                os.kill(os.getpid(), signal.SIGKILL if strike.how == KILL else signal.SIGSTOP)
            return strike.how == LOSE

    @contextmanager
    def observed(self) -> Iterator[None]:
        """In the block, each call of a database or a service passes a boundary first."""
        global _observed  # noqa: PLW0603  # a process has one delivery at a time
        _observed = self
        try:
            with ExitStack() as patches:
                self._observe_databases(patches)
                yield
        finally:
            _observed = None

    def _observe_databases(self, patches: ExitStack) -> None:
        def replace(owner: type, name: str, make: Callable[..., Any], *args: str) -> None:
            made = make(getattr(owner, name), *args)
            patches.enter_context(patch.object(owner, name, made))

        for name in ("_execute", "_executemany"):  # below all wrappers: what is really sent
            replace(CursorWrapper, name, self._executing)
        backends = {type(connection) for connection in connections.all()}
        # A class before the one that it inherits from, or it would inherit what is put there.
        for backend in sorted(backends, key=lambda backend: -len(backend.__mro__)):
            replace(backend, "connect", self._connecting_first)
            replace(backend, "_commit", self._ending, COMMIT)
            replace(backend, "_rollback", self._ending, "ROLLBACK")

    def _executing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def executed(cursor: CursorWrapper, sql: Any, *arguments: Any) -> Any:
            self.before(" ".join(str(sql).split())[:SHOWN])
            return execute(cursor, sql, *arguments)

        return executed

    def _connecting_first(self, connect: Callable[[Any], None]) -> Callable[[Any], None]:
        def connected(connection: Any) -> None:
            self.before("CONNECT")
            self._connecting.now = True  # what is executed to that end is no boundary
            try:
                connect(connection)
            finally:
                self._connecting.now = False

        return connected

    def _ending(self, end: Callable[[Any], None], what: str) -> Callable[[Any], None]:
        def ended(connection: Any) -> None:
            lost = self.before(what)
            end(connection)
            if lost:
                connection.connection.close()
                raise OperationalError(
                    f"The connection was lost before the response to the {what}."
                )

        return ended


_observed: Boundaries | None = None


def _before(what: str) -> bool:
    """Pass a boundary, where they are observed; whether the response gets lost."""
    return _observed is not None and _observed.before(what)


_TABLE = "CREATE TABLE done (number INTEGER PRIMARY KEY, reference TEXT, key TEXT UNIQUE)"
_LOCKED = 60.0  # seconds that a call waits for those of other processes


class Service:
    """A stand-in for a service outside of the database, such as a payment provider. ::

        provider = Service("provider")

        def charge(order, execution):
            return provider.call(order.reference, key=execution.derive_key("charge"))

        provider.effects("order-17")  # 1

    It does something once per key, as such services promise; without a key, at each call. What it
    has done outlives the process that called it. Before a call, :func:`chaos` can kill and pause
    the process; it can also lose the response.

    Args:
        name: for the report.
    """

    def __init__(self, name: str = "service") -> None:
        self.name = name
        folder = tempfile.mkdtemp(prefix="idempotency-service-")
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder, "done.sqlite3")
        self._execute(_TABLE)

    def call(self, reference: object, *, key: str = "") -> str:
        """Do something, unless it was done under this key.

        Args:
            reference: what it is done for: the order, the message.
            key: the caller's idempotency key.

        Returns:
            What names it, such as ``"provider-1"``, the same for each call with a key.

        Raises:
            TimeoutError: it is done, but the response is lost.
        """
        lost = _before(CALL + self.name)
        key = key or uuid4().hex
        self._execute(
            "INSERT OR IGNORE INTO done (reference, key) VALUES (?, ?)", str(reference), key
        )
        number = self._execute("SELECT number FROM done WHERE key = ?", key)
        if lost:
            raise TimeoutError(f"{self.name} did not respond.")
        return f"{self.name}-{number}"

    def effects(self, reference: object) -> int:
        """The number of times that it was done for this reference."""
        return int(self._execute("SELECT count(*) FROM done WHERE reference = ?", str(reference)))

    def forget(self) -> None:
        """Forget all that was done, as a database of tests does between two of them."""
        self._execute("DELETE FROM done")

    def _execute(self, sql: str, *values: str) -> Any:
        """Execute a statement in a transaction of its own; the first column of its first row."""
        with closing(sqlite3.connect(self._path, timeout=_LOCKED)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            row = connection.execute(sql, values).fetchone()
        return row and row[0]


# The tables of the package.

_LEASE: Final = "lease_expires_at"
_PAST: Final = timedelta(seconds=1)
_UNTIL: Final = "process_after"
"""The column of the tables of messaging that says until when something waits."""
_DONE: Final = ("done", "discarded")


def end_waits() -> int:
    """End all leases, and make all messages due; how many rows that changed.

    Time is not passed by waiting: what ends in the future by the database's clock has ended.
    """
    now = DatabaseNow()
    waiting: list[tuple[QuerySet[Any], str]] = [
        (records.filter(status=Status.IN_PROGRESS).exclude(lease_expires_at__lte=now), _LEASE)
        for records in _records()
    ]
    for rows, columns in _messaging():
        if _UNTIL in columns:
            waiting.append((rows.filter(process_after__gt=now), _UNTIL))
    return sum(rows.update(**{column: now - _PAST}) for rows, column in waiting)


def stuck() -> Counter[str]:
    """Counts the rows of the package's tables that are neither done nor given up, by state."""
    found: Counter[str] = Counter()
    for records in _records():
        in_progress = records.filter(status=Status.IN_PROGRESS)
        found["record held"] += in_progress.filter(hold=True).count()
        found["record in progress"] += in_progress.filter(hold=False).count()
    for rows, columns in _messaging():
        if "state" in columns:
            left = rows.exclude(state__in=_DONE).values_list("state").annotate(Count("pk"))
            name = rows.model._meta.verbose_name
            found.update({f"{name} {state}": count for state, count in left.order_by("state")})
    return +found


def _records() -> Iterator[IdempotencyKeyQuerySet]:
    for using in {store.using for store in stores.all()} - {None}:
        yield IdempotencyKeyQuerySet(IdempotencyKey, using=using)


def _messaging() -> Iterator[tuple[QuerySet[Any], set[str]]]:
    """The tables of messaging and their columns, where its app is installed."""
    if apps.is_installed("idempotency_django.contrib.messaging"):
        for model in apps.get_app_config("idempotency_messaging").get_models():
            columns = {field.name for field in model._meta.fields}
            yield QuerySet(model, using=database()), columns


# The processes.

LONGEST: Final = 60
"""Seconds after which a delivery is ended: it waits for something that does not come."""

_REFUSED: Final = 400  # HTTP statuses from here on acknowledge nothing


@dataclass
class Ended:
    """The end of a delivery.

    Attributes:
        error: why the message is not acknowledged; empty: it is.
        passed: what its boundaries were before.
        struck: before what it was struck; empty: it was not.
    """

    error: str = "its process did not say how it ended"
    passed: list[str] = field(default_factory=list)
    struck: str = ""


class Child:
    """A process that executes a function, whose connections to databases are its own.

    Args:
        call: the function.
        strike: what is to happen to the process.

    Attributes:
        ended: how it ended, as far as it has said.
    """

    def __init__(self, call: Callable[[], Any], strike: Strike | None = None) -> None:
        close_connections()
        fork = get_context("fork")
        self._reader, writer = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_execute, args=(call, strike, writer))
        with warnings.catch_warnings():
            # Python warns of threads. The heartbeats know about forks; others should not be there.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        writer.close()
        self.ended = Ended()
        self._over = False

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, within so many seconds if there is a limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._over:
            if not self._reader.poll(deadline and max(0.0, deadline - time.monotonic())):
                return False
            self._read()
        return True

    def wait_for_pause(self) -> bool:
        """Return when it is paused (``True``), or has ended before that."""
        while not (self._over or self.ended.struck):
            self._read()
        if not self._over:
            os.waitpid(self._process.pid or 0, os.WUNTRACED)
        return not self._over

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def close(self) -> None:
        """Kill it, if it has not ended."""
        if not self._over:
            self._process.kill()
            self.wait()

    def _read(self) -> None:
        """Take in what it says next, or that it has ended."""
        try:
            vars(self.ended).update(self._reader.recv())
        except EOFError:
            self._over = True
            self._reader.close()
            self._process.join()
            number = -(self._process.exitcode or 0)
            if number == signal.SIGALRM:
                self.ended.error = f"it took longer than {LONGEST} seconds"
            elif number > 0:
                self.ended.error = f"its process ended with {signal.Signals(number).name}"


def _execute(call: Callable[[], Any], strike: Strike | None, writer: Connection) -> None:
    """Execute the function in the new process."""
    gc.freeze()  # what the parent has left for its collector is none of ours
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST)
    boundaries = Boundaries(strike, lambda what: writer.send({"struck": what}))
    with boundaries.observed():
        error = outcome(call)
        if not error:
            boundaries.before(ACKNOWLEDGEMENT)
    connections.close_all()
    writer.send({"error": error, "passed": boundaries.passed})


def outcome(call: Callable[[], Any]) -> str:
    """Call a function that delivers a message: why it is not acknowledged, or nothing."""
    try:
        returned = call()
    except Exception as error:  # noqa: BLE001  # whatever it is, the message is delivered again
        return f"{type(error).__name__}: {error}"
    status = getattr(returned, "status_code", 0)
    return f"HTTP {status}" if status >= _REFUSED else ""


def close_connections() -> None:
    """Leave the databases, so that a process that is made now has nothing of this one's."""
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        if hasattr(connection, "close_pool"):
            connection.close_pool()


# The report.


def _counts(effects: Effects) -> Collection[int]:
    return effects.values() if isinstance(effects, Mapping) else [effects]


@dataclass
class Trial:
    """One message, the deliveries of it and their effects.

    Attributes:
        what: what happened to its deliveries, such as ``"killed before COMMIT"``.
        message: the message.
        effects: what was counted in the end.
        deliveries: how often it was delivered.
        kills: how many of the deliveries were killed.
        error: why the last delivery was not acknowledged; empty: it was.
        stuck: what the message left in the package's tables that is neither done nor given up.
    """

    what: str
    message: Any
    effects: Effects = 0
    deliveries: int = 0
    kills: int = 0
    error: str = ""
    stuck: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether it has one effect of each kind, is acknowledged and left nothing."""
        return {*_counts(self.effects)} == {1} and not (self.error or self.stuck)


@dataclass(frozen=True)
class Report:
    """The findings of :func:`chaos`.

    Attributes:
        boundaries: what an undisturbed delivery passes, in order.
        trials: what became of each message.
    """

    boundaries: Sequence[str]
    trials: Sequence[Trial]

    def assert_passed(self) -> None:
        """Each message has the expected effects, is acknowledged and left nothing."""
        assert self.trials
        assert not self.failures, self.failures

    @property
    def failures(self) -> list[Trial]:
        """The trials in which something is wrong."""
        return [trial for trial in self.trials if not trial.is_right]

    @property
    def effects(self) -> set[int]:
        """The numbers of effects that messages had, ``{1}`` if each had one of each kind."""
        return {count for trial in self.trials for count in _counts(trial.effects)}

    @property
    def kills(self) -> int:
        """The number of processes that were killed."""
        return sum(trial.kills for trial in self.trials)

    def __str__(self) -> str:
        deliveries = sum(trial.deliveries for trial in self.trials)
        return (
            f"{len(self.boundaries)} boundaries, {len(self.trials)} messages, "
            f"{deliveries} deliveries, {self.kills} kills"
        )


# The trials.

_PAUSES: Final = (0.01, 1.0)
"""Seconds before the next delivery: the first time, and at most."""

_SHORTEST: Final = 0.25
_SLOWEST: Final = 3
"""A duplicate that takes so many times as long as an undisturbed delivery, and so many seconds at
least, waits for a process that is paused, so that goes on. So it does after a duplicate that is
only slow: then the trial has not ended its lease."""

_MESSAGES, _PROCESSES = 6, 3  # of a storm

_WORDS: Final = {KILL: "killed before", PAUSE: "paused before", LOSE: "no response to"}


class _NothingWaits(Exception):
    """There is no lease that could be over."""


@dataclass
class Trials(Generic[M]):
    """The trials of one handler. The arguments are those of :func:`chaos`."""

    deliver: Callable[[M], object]
    message: Callable[[int], M]
    effects: Callable[[M], Effects]
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
            trial = self._new("undisturbed, twice")
            started = time.monotonic()
            self.boundaries = self._redeliver(trial).passed
            self._patience = max(_SHORTEST, _SLOWEST * (time.monotonic() - started))
            if not trial.error:
                self._redeliver(trial)
        return self._ended([trial], before)[0]

    def struck(self, strike: Strike) -> list[Trial]:
        """Kill the first delivery, or lose a response that it gets; deliver until acknowledged."""
        trial, before = self._new(), stuck()
        self._deliver(trial, strike)
        self._recover(trial)
        return self._ended([trial], before)

    def overtaken(self, strike: Strike) -> list[Trial]:
        """Pause the first delivery, and deliver a duplicate meanwhile; then let it go on.

        If the duplicate is refused because of a lease, the lease ends, and the duplicate comes
        again: the first delivery is late then.
        """
        trial, before, late = self._new(), stuck(), ""
        deliver = partial(self.deliver, trial.message)
        with closing(Child(deliver, strike)) as first:
            if first.wait_for_pause():
                with closing(Child(deliver)) as second:
                    over = second.wait(self._patience)  # else it waits for a lock of the first
                    if over and second.ended.error and self._overtake(trial):
                        late = ", lease over"
                    first.resume()
                    self._note(trial, second)
            self._note(trial, first, strike)
        trial.what += late
        self._recover(trial)
        return self._ended([trial], before)

    def storm(self) -> list[Trial]:
        """Deliver several messages from several processes at once, each in an order of its own."""
        storm, before = [self._new("at once, in any order") for _ in range(_MESSAGES)], stuck()
        together = get_context("fork").Barrier(_PROCESSES)
        with ExitStack() as children:
            for _ in range(_PROCESSES):
                order = [trial.message for trial in storm]
                self.chance.shuffle(order)
                child = Child(partial(self._deliver_all, order, together.wait))
                children.callback(child.close)
                children.callback(child.wait)
        for trial in storm:
            trial.deliveries += _PROCESSES
            self._recover(trial)
        return self._ended(storm, before)

    def _new(self, what: str = "") -> Trial:
        return Trial(what, self.message(next(self._numbers)))

    def _deliver(self, trial: Trial, strike: Strike | None = None) -> Ended:
        with closing(Child(partial(self.deliver, trial.message), strike)) as child:
            return self._note(trial, child, strike)

    def _note(self, trial: Trial, child: Child, strike: Strike | None = None) -> Ended:
        """Wait for the end of a delivery, and count it."""
        child.wait()
        ended = child.ended
        trial.deliveries += 1
        trial.error = ended.error
        if strike is not None:
            trial.kills += bool(ended.struck) and strike.how == KILL
            where = ended.struck or "a boundary that it did not come to"
            trial.what = trial.what or f"{_WORDS[strike.how]} {where}"
        return ended

    def _recover(self, trial: Trial) -> None:
        """Deliver until the message is acknowledged, once at least."""
        pause, longest = _PAUSES
        for _ in range(self.attempts):
            self._redeliver(trial)
            if not trial.error:
                return
            time.sleep(pause)  # a server may not have noticed yet that a process is dead
            pause = min(pause * 2, longest)

    def _redeliver(self, trial: Trial) -> Ended:
        end_waits()
        return self._deliver(trial)

    def _overtake(self, trial: Trial) -> bool:
        """Deliver it with the lease over; whether it was acknowledged, and the owner is late."""
        with closing(Child(partial(self._deliver_late, trial.message))) as child:
            late = child.wait(self._patience) and not child.ended.error
            if late:
                self._note(trial, child)
        return late

    def _deliver_late(self, message: M) -> object:
        if not end_waits():
            raise _NothingWaits
        return self.deliver(message)

    def _deliver_all(self, messages: list[M], begin: Callable[[], object]) -> None:
        begin()
        for message in messages:
            outcome(partial(self.deliver, message))  # what was refused is delivered again later

    def _ended(self, trials: list[Trial], before: Counter[str]) -> list[Trial]:
        """Count the effects of messages; what is stuck since then is the last one's."""
        for trial in trials:
            trial.effects = self.effects(trial.message)
        trials[-1].stuck = stuck() - before
        return trials


def chaos(
    deliver: Callable[[M], object],
    message: Callable[[int], M],
    effects: Callable[[M], Effects],
    *,
    disturbances: Collection[str] = DISTURBANCES,
    limit: int | None = None,
    attempts: int = 10,
) -> Report:
    """Kill, pause, duplicate and reorder deliveries of messages, and count their effects.

    A delivery is a call of ``deliver`` in a process of its own. It has *boundaries*: before each
    statement and each commit, before each call of a :class:`Service`, and before the
    acknowledgement. First, a delivery that is not disturbed shows them. Then each trial has a
    message of its own and one disturbance:

    ``"kill"``
        The process is killed (SIGKILL) at a boundary. The message is delivered until it is
        acknowledged; leases are over by then, and messages that wait are due.
    ``"pause"``
        The process is paused at a boundary, and a duplicate is delivered meanwhile. If the
        duplicate is refused because of a lease, the lease ends and it is delivered again. Then the
        first process goes on.
    ``"lose"``
        A :class:`Service` does what it was asked for, and the caller gets a ``TimeoutError``; or
        the database commits, and the connection is lost before its response.
    ``"storm"``
        Several messages are delivered by several processes at once, by each in another order.

    Args:
        deliver: delivers a message once, or calls a view. When it returns, the message is
            acknowledged. When it raises, or returns a response with a status of 400 or more, it is
            not, and is delivered again.
        message: makes the message of this number.
        effects: counts what the message has done: how often, or how often each of several things.
        disturbances: some of ``"kill"``, ``"pause"``, ``"lose"`` and ``"storm"``.
        limit: how many trials to make; they are chosen at random. By default all.
        attempts: how many further deliveries a message has.
    """
    chance = random.Random(0)
    trials = Trials(deliver, message, effects, attempts, chance)
    ended = [trials.undisturbed()]
    assert not ended[0].error, ended[0].error
    cases = list(_cases(trials, disturbances))
    if limit is not None and limit < len(cases):
        cases = chance.sample(cases, limit)
    for case in cases:
        ended += case()
    return Report(trials.boundaries, ended)


def _cases(
    trials: Trials[M], disturbances: Collection[str]
) -> Iterator[Callable[[], Sequence[Trial]]]:
    """Every trial there can be."""
    for number, what in enumerate(trials.boundaries):
        if KILL in disturbances:
            yield partial(trials.struck, Strike(KILL, number))
        if LOSE in disturbances and what.startswith((CALL, COMMIT)):
            yield partial(trials.struck, Strike(LOSE, number))
        if PAUSE in disturbances:
            yield partial(trials.overtaken, Strike(PAUSE, number))
    if STORM in disturbances:
        yield trials.storm
