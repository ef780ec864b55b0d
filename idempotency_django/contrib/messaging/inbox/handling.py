"""The handling of inbox messages by their receiver or consumer, with their records.

In the transactional mode, the message's own row is the record: what the handler writes is committed
together with the fact that the message is done. There is a record of the store besides the row in
the leased mode, on another database, and for the dead letters of consumers, which had one before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final

from django.db.models import F
from django.db.models.functions import Coalesce
from django.utils.datastructures import CaseInsensitiveMapping

from ....engine import Plan, plan_call
from ....models import DatabaseNow
from ....policy import digest
from ....stores import (
    Claim,
    Operation,
    Payload,
    Record,
    Status,
    Store,
    new_token,
    plain,
    reference,
    stores,
)
from ..conf import conf
from ..consumers import Consumer, EventExecution, Handler, RecordOf, consumers
from ..databases import LONGEST, database
from ..dead_letters import rows_of, sender_of
from ..events import Event
from ..models import InboxMessage, MessageState
from ..verifiers import Contents
from .receivers import WebhookReceiver, event_of, policy_of, receiver_of, receivers, scope_of

METHOD: Final = "WEBHOOK"
"""The value in place of the HTTP method in the audit."""

CONSUMER: Final = "consumer:"
"""The prefix of the source of a consumer's dead letters."""


class NoReceiver(LookupError):
    """There is no receiver, or no consumer, for the source of a message."""


def known_sources() -> list[str]:
    """The sources whose messages can be handled: the receivers', and those of listed consumers."""
    names = consumers() if conf.consumers else ()
    return [*sorted(receivers()), *(f"{CONSUMER}{name}" for name in sorted(names))]


def handling_of(message: InboxMessage, own: OwnRecord) -> Callable[[], object] | None:
    """The handler of the message; ``None``: there is no handler for its type.

    Args:
        message: the message, which was claimed.
        own: its row as its record, which is used where it can be.

    Raises:
        NoReceiver: there is no receiver or consumer for its source.
    """
    if message.source.startswith(CONSUMER):
        consumer, event, sender = _dead_letter(message)
        return lambda: consumer.handle(event, sender=sender, redelivered=True)
    receiver = _receiver(message)
    handler = receiver.handler_of(message.type)
    if handler is None:
        return None
    event = event_of(message.source, contents_of(message))
    plan = _plan(receiver, message, handler)
    if is_own := own.can_replace(plan):
        plan = replace(plan, store=own, operation=own.operation(plan.operation))
    execution = EventExecution(plan, event, handler)
    # Another claim is committed first, so that an attempt counts that ends with its process.
    return lambda: execution.run(claim_first=not is_own)


def contents_of(message: InboxMessage) -> Contents:
    """The contents of the delivery.

    Raises:
        NoReceiver: there is no receiver for its source.
    """
    headers: Any = CaseInsensitiveMapping(dict(json.loads(message.headers)))
    return _receiver(message).verifier.read(headers, bytes(message.body))


def group_of(message: InboxMessage) -> str:
    """The group of a message that was stored without one.

    Raises:
        NoReceiver: there is no receiver for its source.
    """
    return _receiver(message)().group_of(contents_of(message))


def record_of(message: InboxMessage) -> RecordOf:
    """The store, scope and key of the message's record.

    Raises:
        NoReceiver: there is no receiver or consumer for its source.
        ValueError: a consumer's dead letter is not an event, or lacks its sender.
    """
    if message.source.startswith(CONSUMER):
        consumer, event, sender = _dead_letter(message)
        return consumer.record_of(event, sender=sender)
    store = stores[policy_of(_receiver(message)).store]
    return RecordOf.named(
        store, message.message_id, scope_of(message.source), digest(message.digest)
    )


def reference_of(message: InboxMessage) -> str:
    """The reference to the message in the ``caused_by`` of its record."""
    return reference(message.message_id, f"inbox:{message.source}")


def _plan(receiver: type[WebhookReceiver], message: InboxMessage, handler: Handler) -> Plan:
    return plan_call(
        handler.policy(policy_of(receiver)),
        key=message.message_id,
        scope=scope_of(message.source),
        name=f"{message.source} {message.type}"[:255],
        content_digest=digest(message.digest),
        method=METHOD,
        max_attempts=receiver.max_attempts,
        caused_by=reference_of(message),
    )


def _receiver(message: InboxMessage) -> type[WebhookReceiver]:
    receiver = receiver_of(message.source)
    if receiver is None:
        raise NoReceiver(
            f"No WebhookReceiver has the source {message.source!r}. Check that it is in the "
            "URLconf and that its source was not renamed."
        )
    return receiver


def _dead_letter(message: InboxMessage) -> tuple[Consumer, Event, str]:
    """The consumer whose dead letter it is, the event, and its sender."""
    event = Event.from_json(bytes(message.body))
    return _consumer(message), event, sender_of(json.loads(message.headers))


def _consumer(message: InboxMessage) -> Consumer:
    name = message.source.removeprefix(CONSUMER)
    try:
        return consumers()[name]
    except KeyError:
        raise NoReceiver(
            f"No consumer is called {name!r}. List its path in IDEMPOTENCY['CONSUMERS']."
        ) from None


class OwnRecord(Store):
    """The store of one message that was claimed: its row is the record of its handler.

    The engine finds in it what it finds in the store of a request. The handler's transaction locks
    the row first, so that no other process takes over while it runs, and completes the row last. A
    process that dies loses the lock; its attempt was counted when the message was claimed.

    Args:
        message: the message.
        finish: writes columns of the row, if the attempt is still the message's.
        purge_at: when the row may be purged once it is done.
    """

    supports_transactions: ClassVar[bool] = True

    _store: Store

    def __init__(
        self, message: InboxMessage, finish: Callable[..., bool], purge_at: Callable[[], Any]
    ) -> None:
        super().__init__("inbox")
        self.using = database()
        self.is_begun = False
        self._is_completed = False
        self._message, self._finish, self._purge_at = message, finish, purge_at
        self._is_held = False

    def can_replace(self, plan: Plan) -> bool:
        """Whether the row takes the place of the record in the plan's store."""
        store = plan.store
        # A message that was stored before fingerprints existed may have a record.
        is_known = bool(self._message.fingerprint) and plan.operation.lease is None
        if not (is_known and store.supports_transactions and store.using == self.using):
            return False
        self._store = store
        return True

    def operation(self, operation: Operation) -> Operation:
        """The operation, whose effects name the message as their cause.

        Its scope is that of a record in the store: so both derive the same keys.
        """
        return replace(operation, caused_by="", cause_reference=reference_of(self._message))

    def acquire(self, operation: Operation) -> Claim | Record:
        message = self._message
        mine = InboxMessage.objects.using(self.using).filter(
            pk=message.pk, state=MessageState.PENDING, attempts=message.attempts
        )
        columns = "ended", "fingerprint", "processed_at"
        row = mine.select_for_update().values_list(*columns).first()
        if row is None:
            return self._record(operation, Status.IN_PROGRESS)
        ended, fingerprint, was_committed = row
        interrupted = ended < message.attempts - 1 or bool(was_committed)
        if fingerprint != operation.fingerprint:  # SECRET_KEY was changed; keys stay the same
            return self._record(operation, Status.FAILED, fingerprint)
        if interrupted and operation.hold:
            self._is_held = True
            return self.get(operation.key, operation.scope)
        if operation.hold:  # the remaining record shows another commit
            mine.update(processed_at=DatabaseNow())
        self.is_begun = True
        return Claim(operation, message.attempts, new_token(), message.pk, interrupted=interrupted)

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        self._is_completed = self._finish(
            state=MessageState.DONE,
            error="",
            ended=F("attempts"),
            process_after=None,
            processed_at=DatabaseNow(),
            purge_at=self._purge_at(),
        )
        return self._is_completed

    def is_committed(self) -> bool:
        """Whether the message is done, although an error was raised after its handler."""
        rows = InboxMessage.objects.using(self.using)
        done = rows.filter(pk=self._message.pk, state=MessageState.DONE)
        return self._is_completed and done.exists()

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        self._is_held |= held
        dead = {"state": MessageState.DEAD, "process_after": None} if held else {}
        return self._finish(error=plain(error, LONGEST), ended=F("attempts"), **dead)

    def get(self, key: str, scope: str) -> Record:
        return Record(
            key=key,
            scope=scope,
            status=Status.IN_PROGRESS if self._is_held else Status.FAILED,
            attempt=self._message.attempts,
            interrupted=self._is_held,
            held=self._is_held,
        )

    def _record(self, operation: Operation, status: Status, fingerprint: str = "") -> Record:
        """The record that exists instead of a claim."""
        key, scope = operation.key, operation.scope
        return Record(key=key, scope=scope, status=status, fingerprint=fingerprint)

    def extend(self, claim: Claim, seconds: float) -> bool:
        raise NotImplementedError  # its claims have no lease

    def record_replay(self, record: Record, operation: Operation) -> None:
        raise NotImplementedError  # a message that is done is not claimed

    def purge(self, older_than: Any, limit: int) -> int:
        return 0  # the queue is purged

    # As the store whose place it takes.

    def transaction(self) -> AbstractContextManager[None]:
        return self._store.transaction()

    def was_ended_by_server(self, error: BaseException) -> bool:
        return self._store.was_ended_by_server(error)

    def on_commit(self, function: Callable[[], object]) -> None:
        self._store.on_commit(function)


def expire(message: InboxMessage) -> None:
    """Let the next attempt start from the beginning."""
    record = record_of(message)
    now, retention = DatabaseNow(), F("purge_at") - F("expires_at")
    completed = rows_of(record).filter(status=Status.COMPLETED)
    completed.update(purge_at=Coalesce(now + retention, now), expires_at=now)
    record.store.forget(record.key, record.scope)
