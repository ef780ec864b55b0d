"""What the store contract says of one caller after another, as a state machine for Hypothesis.

It drives a store through random interleavings of everything that claims, their late owners, purges
and time can do, keeps its own account of what must be, and compares the two after each step. Time
passes without waiting: a :class:`Subject` moves all that its store knows about back instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from idempotency_django.errors import ClaimLost
from idempotency_django.stores import Store
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status, Step
from idempotency_django.testing import an_operation

STEPS = 12

# Time passes in hundreds of seconds, and nothing ends at one: what really passes meanwhile may be
# anything up to fifty seconds.
UNIT = 100.0
SCOPES = ("user:1|POST /charges/", "user:2|POST /charges/")
LEASES = (150.0, 450.0)
LIFETIMES = (950.0, 250.0, None)  # of which a UNIT is more than a tenth: it counts anew then
RETENTIONS = (0.0, 500.0)
PASSING = (UNIT, 3 * UNIT, 10 * UNIT)
PAYLOADS = (
    Payload(201, (("Location", "/charges/1"),), b"\x00\xff one"),
    Payload(404, (), b""),
    Payload(200, (), None),
)


@dataclass(frozen=True)
class Wish:
    """What an operation asks of the store, besides its name; times in seconds."""

    content: str
    lease: float | None
    ttl: float | None
    hold: bool
    retention: float
    count_replays: bool

    def operation(self, key: str, scope: str) -> Operation:
        """The operation of that name."""
        return an_operation(
            key=key,
            scope=scope,
            fingerprint=self.content * 64,
            lease=_duration(self.lease),
            ttl=_duration(self.ttl),
            hold=self.hold,
            retention=timedelta(seconds=self.retention),
            count_replays=self.count_replays,
        )


WISHES = [
    Wish(*wish)
    for wish in product(
        "ab", (*LEASES, None), LIFETIMES, (False, False, True), RETENTIONS, (False, True)
    )
]


@dataclass
class Life:
    """What must be true of a record, until it is gone; points in time in seconds of the model.

    ``started`` is when its time to live began: with the claim, and anew with the response.
    """

    claim: Claim
    started: float
    lease_ends: float | None
    steps: list[Step] = field(default_factory=list)
    status: Status = Status.IN_PROGRESS
    payload: Payload | None = None
    pinned: bool = False

    def is_over(self, now: float, *more: timedelta) -> bool:
        """Whether its time to live, and what comes on top, has ended."""
        ttl = self.claim.operation.ttl
        if ttl is None:
            return False
        return now >= self.started + sum((ttl, *more), timedelta()).total_seconds()

    def is_expired(self, now: float) -> bool:
        """Whether it was settled and has expired."""
        return self.status is not Status.IN_PROGRESS and self.is_over(now)

    def is_interrupted(self, now: float) -> bool:
        """Whether its owner is late."""
        lapsed = self.lease_ends is not None and now >= self.lease_ends
        return self.status is Status.IN_PROGRESS and lapsed

    def is_free_for(self, operation: Operation, now: float) -> bool:
        """Whether the operation may claim it."""
        mine = self.claim.operation
        same = mine.fingerprint == operation.fingerprint
        if self.status is Status.FAILED:
            bound = self.pinned or bool(self.steps)
            return same or not bound or self.is_expired(now)
        return self.is_expired(now) or (self.is_interrupted(now) and same and not mine.hold)

    def may_go(self, now: float, *more: timedelta) -> bool:
        """Whether it may be deleted, that long after its time to live."""
        abandoned = self.is_interrupted(now) and not self.claim.operation.hold
        return (self.status is not Status.IN_PROGRESS or abandoned) and self.is_over(now, *more)

    def must_go(self, now: float) -> bool:
        """Whether a store that forgets has forgotten it: settled, and nothing goes on."""
        return self.is_expired(now) and now >= (self.lease_ends or 0)


@dataclass
class Slot:
    """One key in one scope: everyone who ever claimed it, and what it holds."""

    key: str
    scope: str
    claims: list[Claim] = field(default_factory=list)
    life: Life | None = None

    def claim(self, age: int) -> Claim:
        """The newest claim, or one of its predecessors."""
        return self.claims[-1 - age % len(self.claims)]

    def is_owner(self, claim: Claim) -> bool:
        """Whether the record is in progress and the claim is the newest on it."""
        life = self.life
        return life is not None and life.claim == claim and life.status is Status.IN_PROGRESS

    def expected(self, now: float) -> Record | None:
        """What the store must say is there."""
        life = self.life
        if life is None:
            return None
        interrupted = life.is_interrupted(now)
        return Record(
            key=self.key,
            scope=self.scope,
            status=life.status,
            attempt=life.claim.attempt,
            fingerprint=life.claim.operation.fingerprint,
            payload=life.payload,
            expired=life.is_expired(now),
            interrupted=interrupted,
            held=interrupted and life.claim.operation.hold,
        )


@dataclass
class Subject:
    """A store that is to be shown, and how time passes for it.

    Attributes:
        store: makes the store for one example.
        pass_time: moves everything the store knows of the key so many seconds into the past.
        clean: removes the key from the store.
        forgets: whether expired records go by themselves, without a purge or retention.
        examples: how many examples it has been through without a fault.
        steps: how many steps these were together.
    """

    store: Callable[[], Store]
    pass_time: Callable[[Store, str, float], None]
    clean: Callable[[Store, str], None] = lambda store, key: None
    forgets: bool = False
    examples: int = 0
    steps: int = 0


slots = st.sampled_from((0, 0, 1))
wishes = st.sampled_from(WISHES)
ages = st.sampled_from((0, 0, 1, 2))


class StoreMachine(RuleBasedStateMachine):
    """One key in two scopes of a store, and everything that may happen to it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self.store = subject.store()
        self.key = str(uuid4())
        self.slots = [Slot(self.key, scope) for scope in SCOPES]
        self.now = 0.0

    # What contenders do.

    @initialize(wish=wishes)
    def begin(self, wish: Wish) -> None:
        """Somebody claims the key."""
        self.acquire(0, wish)

    @rule(slot=slots, wish=wishes)
    def acquire(self, slot: int, wish: Wish) -> None:
        """Somebody asks for something under the key."""
        self._acquire(self.slots[slot], wish.operation(self.key, SCOPES[slot]))

    @precondition(lambda self: self.slots[0].claims)
    @rule(age=ages)
    def retry(self, age: int) -> None:
        """Somebody asks for the same as an earlier claimant."""
        self._acquire(self.slots[0], self.slots[0].claim(age).operation)

    @rule(slot=slots, wish=wishes, payload=st.none() | st.sampled_from(PAYLOADS))
    def execute(self, slot: int, wish: Wish, payload: Payload | None) -> None:
        """Somebody claims the key for as long as a transaction lasts; without a payload it fails.

        A store without transactions does the same without one.
        """
        operation = replace(wish.operation(self.key, SCOPES[slot]), lease=None)
        with self.store.transaction():
            life = self._claim(self.slots[slot], operation)
            if life and payload is None:
                self._settled(life, self.store.fail(life.claim, "ValueError: no"), Status.FAILED)
            elif life and payload:
                done = self.store.complete(life.claim, payload)
                self._settled(life, done, Status.COMPLETED, payload)
        self._look(self.slots[slot])

    @precondition(lambda self: self.store.supports_transactions)
    @rule(slot=slots, wish=wishes, payload=st.none() | st.sampled_from(PAYLOADS))
    def roll_back(self, slot: int, wish: Wish, payload: Payload | None) -> None:
        """Somebody does so and rolls back: nothing has happened."""
        operation = replace(wish.operation(self.key, SCOPES[slot]), lease=None)
        before = self.slots[slot].life
        try:
            with self.store.transaction():
                life = self._claim(self.slots[slot], operation)
                if life and payload:
                    assert self.store.complete(life.claim, payload), "An owner was fenced off."
                raise _RolledBack
        except _RolledBack:
            self.slots[slot].life = before
        self._look(self.slots[slot])

    # What owners do, late ones too.

    @precondition(lambda self: self.slots[0].claims)
    @rule(age=ages, payload=st.sampled_from(PAYLOADS))
    def complete(self, age: int, payload: Payload) -> None:
        """A claimant has a response."""
        slot, claim = self._claimant(age)
        done = self.store.complete(claim, payload)
        stored = {"status": Status.COMPLETED, "payload": payload, "started": self.now}
        self._judge(slot, claim, done, "complete", **stored)

    @precondition(lambda self: self.slots[0].claims)
    @rule(age=ages, pinned=st.booleans())
    def fail(self, age: int, pinned: bool) -> None:
        """A claimant gives up, after it has had effects elsewhere or not."""
        slot, claim = self._claimant(age)
        done = self.store.fail(claim, "no", pinned=pinned)
        pinned = pinned or (slot.life is not None and slot.life.pinned)
        self._judge(slot, claim, done, "fail", status=Status.FAILED, pinned=pinned)

    @precondition(lambda self: self.slots[0].claims)
    @rule(age=ages, seconds=st.sampled_from(LEASES))
    def extend(self, age: int, seconds: float) -> None:
        """A claimant needs more time."""
        slot, claim = self._claimant(age)
        done = self.store.extend(claim, seconds)
        self._judge(slot, claim, done, "extend", lease_ends=self.now + seconds)

    @precondition(lambda self: self.slots[0].claims and self.store.supports_steps)
    @rule(age=ages)
    def save_step(self, age: int) -> None:
        """A claimant has come to a recovery point."""
        slot, claim = self._claimant(age)
        steps = slot.life.steps if slot.life else []
        step = Step(name=f"step {len(steps)}", attempt=claim.attempt, result="[1]")
        try:
            with self.store.durable("The step"):
                done = self.store.save_step(claim, step)
        except ClaimLost:  # the store has noticed at the commit
            done = False
        self._judge(slot, claim, done, "save a step", steps=[*steps, step])
        if slot.life and slot.is_owner(slot.life.claim):
            self._look_at_steps(slot.life)

    @precondition(lambda self: self.slots[0].claims and self.store.supports_steps)
    @rule(age=ages)
    def fail_behind_step(self, age: int) -> None:
        """A claimant gives up behind a recovery point."""
        self.save_step(age)
        self.fail(age, pinned=False)

    @precondition(lambda self: self.slots[0].claims and self.store.supports_transactions)
    @rule(age=ages)
    def commit(self, age: int) -> None:
        """A claimant commits something of its own."""
        slot, claim = self._claimant(age)
        try:
            with self.store.fenced(claim):
                pass
            done = True
        except ClaimLost:
            done = False
        self._judge(slot, claim, done, "commit")

    # What happens besides.

    @rule(seconds=st.sampled_from(PASSING))
    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self._pass(seconds)

    @precondition(lambda self: self._lease_left() > 0)
    @rule()
    def end_lease(self) -> None:
        """The owner is late."""
        self._pass(self._lease_left())

    @precondition(lambda self: self._life_left() > 0)
    @rule()
    def end_life(self) -> None:
        """The record's time to live ends."""
        self._pass(self._life_left())

    @rule(older_than=st.sampled_from((0, 0, 3 * UNIT)), limit=st.sampled_from((10, 1)))
    def purge(self, older_than: float, limit: int) -> None:
        """An operator deletes what is old."""
        self.subject.steps += 1
        age = timedelta(seconds=older_than)
        doomed = [slot for slot in self.slots if self._is_purgeable(slot, age)]
        gone = self.store.purge(age, limit)
        assert gone == min(limit, len(doomed)), "A purge took what is alive, or left what is not."
        for slot in doomed:
            if self.store.get(slot.key, slot.scope) is None:
                slot.life = None
                gone -= 1
        assert gone == 0, "A purge took something else than it should."
        self._look(*self.slots)

    @precondition(lambda self: self._stored() is not None)
    @rule(extend=st.booleans())
    def replay(self, extend: bool) -> None:
        """The stored response is replayed, which may start its time to live anew."""
        self.subject.steps += 1
        life = self._stored()
        assert life is not None
        operation = replace(life.claim.operation, count_replays=True, extend_on_replay=extend)
        found = self.store.get(self.key, SCOPES[0])
        assert found is not None, "A stored response is gone."
        self.store.record_replay(found, operation)
        if extend:
            life.started = self.now
        self._look(self.slots[0])

    def teardown(self) -> None:
        """Compare for the last time, unless the example was cut short: it has said why then."""
        try:
            if sys.exc_info()[0] is None:
                self._look(*self.slots)
                self.subject.examples += 1
        finally:
            self.subject.clean(self.store, self.key)

    # The account that is kept.

    def _acquire(self, slot: Slot, operation: Operation) -> None:
        if operation.lease is None and self.store.supports_transactions:
            # Without a lease it would need a transaction that does not end with this step.
            operation = replace(operation, lease=timedelta(seconds=LEASES[0]))
        if life := self._claim(slot, operation):
            self._look_at_steps(life)
            self._look(slot)

    def _claim(self, slot: Slot, operation: Operation) -> Life | None:
        """Acquire, and see whether that was right; the new life if it was claimed."""
        self.subject.steps += 1
        self._recall(slot, operation)
        found, old = self.store.acquire(operation), slot.life
        free = old is None or old.is_free_for(operation, self.now)
        if isinstance(found, Record):
            assert not free, f"The key is wedged: {found}"
            assert _facts(found) == slot.expected(self.now), "The record is not what is there."
            return None
        assert free, f"Two owners: {found} after {old}"
        attempt = old.claim.attempt + 1 if old else 1
        assert found.attempt == attempt, f"Attempt {found.attempt} comes after {attempt - 1}."
        assert found.token not in {claim.token for claim in slot.claims}, "A token came again."
        goes_on = old is not None and not old.is_expired(self.now)
        kept = old.steps if old and goes_on else []
        pinned = bool(old and goes_on and (old.pinned or old.is_interrupted(self.now)))
        lease = operation.lease
        ends = None if lease is None else self.now + lease.total_seconds()
        slot.life = Life(found, self.now, ends, kept, pinned=pinned)
        if lease is not None or not self.store.supports_transactions:
            slot.claims.append(found)  # else it ends with its transaction
        return slot.life

    def _recall(self, slot: Slot, operation: Operation) -> None:
        recalled = self.store.recall(operation)
        if recalled is not None:
            problem = "What is recalled is not what is there."
            assert _facts(recalled) == slot.expected(self.now), problem
            assert recalled.status is Status.COMPLETED, "What is in progress was recalled."
            assert not recalled.expired, "An expired response was recalled."

    def _claimant(self, age: int) -> tuple[Slot, Claim]:
        return self.slots[0], self.slots[0].claim(age)

    def _judge(self, slot: Slot, claim: Claim, done: bool, what: str, **changes: Any) -> None:
        """Only an owner may do what it did; then it changes the record."""
        self.subject.steps += 1
        if slot.is_owner(claim):
            assert done, f"The owner could not {what}."
            slot.life = replace(slot.life, **changes)  # type: ignore[type-var]
        else:
            assert not done, f"One that is not the owner could {what}."
        self._look(slot)

    @staticmethod
    def _settled(life: Life, done: bool, status: Status, payload: Payload | None = None) -> None:
        assert done, "An owner was fenced off."
        life.status, life.payload = status, payload

    def _look(self, *slots: Slot) -> None:
        """Compare what is there with what must be."""
        for slot in slots:
            found, life = self.store.get(slot.key, slot.scope), slot.life
            if life and self.subject.forgets:
                if found is None and life.may_go(self.now):
                    slot.life = None
                assert found is None or not life.must_go(self.now), f"{found} stays for ever."
            expected = slot.expected(self.now)
            assert (found and _facts(found)) == expected, f"{found} is there, not {expected}."

    def _look_at_steps(self, life: Life) -> None:
        """Compare the recovery points that an owner is given with those that it must have."""
        if self.store.supports_steps:
            kept = list(self.store.steps(life.claim))
            assert kept == life.steps, f"The steps are {kept}, not {life.steps}."

    def _pass(self, seconds: float) -> None:
        self.subject.steps += 1
        self.subject.pass_time(self.store, self.key, seconds)
        self.now += seconds
        self._look(*self.slots)

    def _lease_left(self) -> float:
        life = self.slots[0].life
        if life is None or life.lease_ends is None or life.status is not Status.IN_PROGRESS:
            return 0
        return _rounded_up(life.lease_ends - self.now)

    def _life_left(self) -> float:
        life = self.slots[0].life
        ttl = life and life.claim.operation.ttl
        if life is None or ttl is None:
            return 0
        return _rounded_up(life.started + ttl.total_seconds() - self.now)

    def _stored(self) -> Life | None:
        life = self.slots[0].life
        if life is None or life.status is not Status.COMPLETED or life.is_expired(self.now):
            return None
        return life

    def _is_purgeable(self, slot: Slot, age: timedelta) -> bool:
        if slot.life is None or self.subject.forgets:
            return False
        return slot.life.may_go(self.now, slot.life.claim.operation.retention, age)


class _RolledBack(Exception):
    pass


def _facts(record: Record) -> Record:
    """What the contract determines of a record."""
    return replace(record, counted=False, record_id=0)


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _rounded_up(seconds: float) -> float:
    return -(-seconds // UNIT) * UNIT


def explore(subject: Subject, examples: int, *, shrink: bool = True) -> None:
    """Drive the store through examples, always the same; raise what the first bad one did."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    run_state_machine_as_test(
        lambda: StoreMachine(subject),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
