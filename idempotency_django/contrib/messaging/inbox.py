"""The webhook inbox: what was received is durable before it is acknowledged, and handled once.

A receiver is the view that webhooks are delivered to. Any number of processes handle what it has
stored. A message is handled as a consumer handles an event that its broker delivers again: the
claim of its record is committed first, so that an attempt counts that ends with its process. The
record says whether the message was handled. Its row only says when to look at it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar, Final, TypeVar

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import F
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery
from django.http import HttpRequest, HttpResponse
from django.urls import get_resolver
from django.utils.datastructures import CaseInsensitiveMapping
from django.views import View

from ...backoff import Backoff
from ...errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ...http import INBOX as IS_INBOX
from ...http import POLICY, problem_response
from ...models import DatabaseNow, IdempotencyStep, unlocked
from ...policy import INHERITED, Policy, keys
from ...stores import Status, forbid_atomic_block, reference
from .conf import conf
from .consumers import Consumer, EventExecution, consumers
from .databases import close_lost_connections, database, reason, unindexed
from .dead_letters import close, release, rows_of
from .errors import DeadLettered, UnknownEventType
from .events import CAUSED_BY, Event
from .loops import handling, hanging
from .models import InboxMessage, MessageState
from .queue import Queue
from .verifiers import Contents, Verifier

logger = logging.getLogger("idempotency_django")

RETRY_AFTER: Final = 30
"""Seconds after which a sender may try again when the database cannot be reached."""

_SECRET_HEADERS: Final = frozenset({"cookie", "authorization", "x-api-key", "x-auth-token"})
_COLUMNS: Final = [each for each in InboxMessage._meta.concrete_fields if not each.primary_key]


def insert(message: InboxMessage) -> bool:
    """Commit the message; ``False``: a message with its source and id, or its unique digest,
    exists.
    """
    using = database()
    query = InsertQuery(InboxMessage, on_conflict=OnConflict.IGNORE)
    query.insert_values(_COLUMNS, [message])
    [(statement, parameters)] = query.get_compiler(using=using).as_sql()
    with connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
        return bool(cursor.rowcount)


def earlier(message: InboxMessage) -> InboxMessage | None:
    """The message that has the source and id of this one, or its unique digest, if there is one."""
    rows = InboxMessage.objects.using(database()).only("message_id", "digest")
    same = rows.filter(source=message.source, message_id=message.message_id).first()
    if same is None and message.unique_digest:
        same = rows.filter(source=message.source, unique_digest=message.unique_digest).first()
    return same


_Function = TypeVar("_Function", bound=Callable[..., Any])
_RECEIVERS: Final[dict[str, type[WebhookReceiver]]] = {}
"""The receivers by path: one that is loaded again replaces itself."""


class _Handlers(Consumer):
    """The handlers of a receiver. The records of its messages have a scope of their own."""

    def scope(self, source: str) -> str:
        return f"webhook:{source}"


class WebhookReceiver(View):
    """A view that stores each verified delivery and responds; a process handles it once, later. ::

        class StripeHook(WebhookReceiver):
            source = "stripe"
            verifier = Stripe(lambda: settings.STRIPE_SECRETS)

        @StripeHook.on("invoice.paid")
        def paid(event, execution):
            Invoice.objects.filter(number=event.data["data"]["object"]["id"]).update(paid=True)

        urlpatterns = [path("webhooks/stripe/", StripeHook.as_view())]

    A delivery gets 200 when it is committed, or was before. ``manage.py
    run_messaging`` calls the handlers.

    Attributes:
        source: who sends: letters, digits and ``_.-``. Under another name, all would be new.
        verifier: tells the sender's deliveries from others.
        ttl: how long a handled message is remembered, which must be longer than the sender may
            deliver it again; ``None``: forever.
        max_attempts: how many attempts at a message may fail before it is dead-lettered; ``None``:
            all.
        policy: the policy of the handlers, for example ``Policy(mode="leased")`` where they call
            ``execution.step()``; by default the project's.
        consumer: handles its messages.
    """

    source: ClassVar[str] = ""
    verifier: ClassVar[Verifier]
    ttl: ClassVar[timedelta | None] = timedelta(days=7)
    max_attempts: ClassVar[int | None] = 10
    policy: ClassVar[Policy | None] = None
    consumer: ClassVar[Consumer]

    http_method_names = ["post"]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "source" not in vars(cls):
            return
        if hasattr(cls, "consumer"):
            raise ImproperlyConfigured(
                f"{cls.__qualname__} has the source {cls.source!r}, and is derived from a receiver "
                "with a source of its own, whose handlers it would not get. Derive both from a "
                "class without a source."
            )
        cls.consumer = _Handlers(
            cls.source, ttl=cls.ttl, max_attempts=cls.max_attempts, policy=cls.policy
        )
        _RECEIVERS[f"{cls.__module__}.{cls.__qualname__}"] = cls

    @classmethod
    def on(cls, *types: str) -> Callable[[_Function], _Function]:
        """Register the decorated function for messages of these types; ``"*"``: of all others.

        As :meth:`.Consumer.on`. It is called with the
        :class:`~idempotency_django.contrib.messaging.Event`, whose data is the whole body, and, if
        it takes a second argument, the
        :class:`~idempotency_django.engine.context.ExecutionContext` of the attempt.
        """
        return cls.consumer.on(*types)

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """The view. Its message is its own protection, and its INSERT its own transaction."""
        view: Any = super().as_view(**initkwargs)
        view.csrf_exempt = True  # the signature says who sent it
        setattr(view, POLICY, None)  # for the middleware
        setattr(view, IS_INBOX, True)
        for using in connections:
            transaction.non_atomic_requests(using)(view)
        return view  # type: ignore[no-any-return]

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Verify and store a delivery."""
        try:
            self._receive(request)
        except DatabaseFault:
            logger.exception("A message of %s could not be stored.", self.source)
            return problem_response(
                StoreUnavailable(
                    "The database cannot be reached, so the delivery was not stored. Deliver it "
                    "again later.",
                    retry_after=RETRY_AFTER,
                )
            )
        except IdempotencyError as error:
            level = logging.ERROR if isinstance(error, FingerprintMismatch) else logging.INFO
            logger.log(level, "A delivery of %s was refused: %s", self.source, error)
            return problem_response(error)
        return HttpResponse(status=200)

    def _receive(self, request: HttpRequest) -> None:
        """Commit the message, unless it was before."""
        forbid_atomic_block(database(), f"A message of {self.source!r}")
        body = request.body
        self.verifier.verify(request.headers, body)
        contents = self.verifier.read(request.headers, body)
        message = self._message(contents, request, body)
        while not insert(message):
            first = earlier(message)
            if first is not None:  # else it has been purged since
                _validate_same(message, first)
                return

    def _message(self, contents: Contents, request: HttpRequest, body: bytes) -> InboxMessage:
        digest = hashlib.sha256(body if contents.same is None else contents.same).hexdigest()
        kept = [(k, v) for k, v in request.headers.items() if k.lower() not in _SECRET_HEADERS]
        return InboxMessage(
            source=self.source,
            message_id=keys.fit(contents.message_id),
            type=contents.type,
            headers=json.dumps(kept),
            body=body,
            digest=digest,
            unique_digest=None if self.verifier.signs_id else digest,
            process_after=DatabaseNow(),
            received_at=DatabaseNow(),
        )


def _validate_same(message: InboxMessage, first: InboxMessage) -> None:
    """Refuse a delivery that may be no genuine one.

    Raises:
        FingerprintMismatch: the first message with its id or body has not both of them.
    """
    if first.message_id != message.message_id:
        raise FingerprintMismatch(
            f"The message {message.message_id!r} has the body of the message {first.message_id!r}, "
            "and the signature does not cover the id, so it may be an attacker's copy. Nothing was "
            "stored. If both are genuine, reprocess the first one in the admin."
        )
    if first.digest != message.digest:
        raise FingerprintMismatch(
            f"The message {message.message_id!r} came before with another body. Nothing was "
            "stored. Check that the id, as the receiver's verifier finds it, is different for each "
            "message."
        )


def receivers() -> dict[str, type[WebhookReceiver]]:
    """The receivers by source. Two of one source are a mistake, which a check reports.

    The URLs are imported first, as they import the views and these their handlers.
    """
    if getattr(settings, "ROOT_URLCONF", None):
        get_resolver().url_patterns  # noqa: B018  # it imports
    return {each.source: each for each in _RECEIVERS.values()}


def check_receivers(**_: Any) -> Sequence[CheckMessage]:
    """Check the receivers of webhooks that the URLs lead to."""
    known = receivers()
    hint = (
        "Give each receiver its own source, a verifier with the sender's signing secrets, such as "
        "Stripe([secret]), and a policy that fits its store."
    )
    return [
        Error(problem, hint=hint, id="idempotency_django.E041")
        for each in _RECEIVERS.values()
        for problem in _problems(each, known[each.source])
    ]


def _problems(receiver: type[WebhookReceiver], last: type[WebhookReceiver]) -> Iterator[str]:
    """The problems of a receiver.

    Args:
        receiver: the receiver.
        last: the last one with its source, which handles the messages.
    """
    name = receiver.__qualname__
    if receiver is not last:
        yield f"{name} and {last.__qualname__} have the same source, {receiver.source!r}."
    if not hasattr(receiver, "verifier"):
        yield f"{name} has no verifier."
    try:
        if hasattr(receiver, "verifier"):
            receiver.verifier.keys()
        if receiver.policy is not None:  # else it is the project's, which other checks judge
            receiver.consumer.validate()
    except ImproperlyConfigured as error:
        yield f"{name} cannot be used: {error}"


CONSUMER: Final = "consumer:"
"""The prefix of the source of a consumer's dead letters."""


class NoReceiver(LookupError):
    """There is no receiver, or no consumer, for the source of a message."""


def known_sources() -> list[str]:
    """The sources whose messages can be handled: the receivers', and those of listed consumers."""
    names = consumers() if conf.consumers else ()
    return [*sorted(receivers()), *(f"{CONSUMER}{name}" for name in sorted(names))]


def execution_of(message: InboxMessage) -> EventExecution:
    """The handling of the message.

    Raises:
        NoReceiver: there is no receiver or consumer for its source.
        UnknownEventType: there is no handler for its type.
        ValueError: a consumer's dead letter is not an event.
    """
    headers, body = json.loads(message.headers), bytes(message.body)
    if message.source.startswith(CONSUMER):
        event = Event.from_json(body)
        name, listed = message.source.removeprefix(CONSUMER), consumers()
        if name not in listed:
            raise NoReceiver(
                f"No consumer is called {name!r}. List its path in IDEMPOTENCY['CONSUMERS']."
            )
        return listed[name].execution_of(event)
    receiver = receivers().get(message.source)
    if receiver is None:
        raise NoReceiver(
            f"No WebhookReceiver has the source {message.source!r}. Check that it is in the "
            "URLconf and that its source was not renamed."
        )
    named: Any = CaseInsensitiveMapping(dict(headers))
    contents = receiver.verifier.read(named, body)
    event = Event(
        id=contents.message_id,
        source=message.source,
        type=contents.type,
        data=contents.data,
        extensions={CAUSED_BY: reference(message.message_id, f"inbox:{message.source}")},
    )
    return receiver.consumer.execution_of(event, key=message.message_id)


class Inbox(Queue):
    """The queue of the inbox."""

    name = "inbox"
    model = InboxMessage
    place = "source"
    since = "received_at"
    retried = (MessageState.DEAD, MessageState.PENDING)

    def retry(self, row: InboxMessage, by: str) -> dict[str, Any]:
        if row.state == MessageState.DEAD:  # else, its next attempt was to come anyway
            release(execution_of(row).plan, by)
        return self._again()

    def discard(self, row: InboxMessage, by: str) -> dict[str, Any]:
        with suppress(NoReceiver, IdempotencyError, ImproperlyConfigured, ValueError):  # it is gone
            close(execution_of(row).plan, by)
        return {"state": MessageState.DISCARDED, "purge_at": purged(row)}

    def repeat(self, row: InboxMessage, by: str) -> dict[str, Any]:
        plan = execution_of(row).plan
        release(plan, by)  # where its receiver was gone when it was discarded
        completed = rows_of(plan).filter(status=Status.COMPLETED)
        if row.state == MessageState.DONE:  # else it goes on after the last step
            IdempotencyStep.objects.using(completed.db).filter(record__in=completed).delete()
        completed.update(status=Status.FAILED, error=f"Reprocessed by {by}.")
        plan.store.forget(plan.operation.key, plan.operation.scope)
        return self._again()

    def _again(self) -> dict[str, Any]:
        return {
            "state": MessageState.PENDING,
            "process_after": DatabaseNow(),
            "processed_at": None,
            "purge_at": None,
        }


INBOX: Final = Inbox()

BATCH: Final = 10
BACKOFF: Final = Backoff(timedelta(seconds=5), timedelta(hours=1))
NO_HANDLER: Final = "There is no handler for its type."
IN_PROGRESS: Final = (
    "An attempt was still in progress when the lease of its claim was over. Its handler takes long "
    "or hangs, or its process died."
)


def claim(at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first, without waiting for locks.

    A claim lasts as long as the lease of the project's policy. After it the message is due again,
    and its record says whether it is still handled. New ones come first.
    """
    rows = InboxMessage.objects.using(database())
    wanted = rows.alias(of=unindexed(F("source"))).exclude(of__in=hanging(INBOX.name))
    due = wanted.filter(process_after__lte=DatabaseNow()).order_by("process_after")
    if not due.values("pk")[:1]:  # on SQLite, a transaction takes the lock of all writers
        return []
    lease = INHERITED.resolved().lease
    with transaction.atomic(using=rows.db):
        claimed = [*unlocked(due)[:at_most]]
        rows.filter(pk__in=[message.pk for message in claimed]).update(
            process_after=DatabaseNow() + lease, attempts=F("attempts") + 1
        )
    for message in claimed:
        message.attempts += 1
    # One of those that come again may have ended its process: it is not the first each time.
    claimed.sort(key=lambda each: random.random() if each.attempts > 1 else 0)  # noqa: S311  # no secret
    return claimed


def give_back(messages: Iterable[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, attempts=F("attempts") - 1, process_after=DatabaseNow())


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged."""
    mine = InboxMessage.objects.using(database()).filter(
        pk=message.pk, state=MessageState.PENDING, attempts=message.attempts
    )
    return bool(mine.update(**changes))


def process_due(*, batch: int = BATCH, stop: threading.Event | None = None) -> Counter[str]:
    """Handle what is due, until nothing is.

    Several processes may do so at a time. A message whose process dies is due again after the
    lease of the project's policy.

    Args:
        batch: how many messages are claimed in one transaction.
        stop: when it is set, the message in hand is finished, and no other is begun.

    Returns:
        How many messages are in which state now. Those in ``"pending"`` are due again later.
    """
    stop, tally = stop or threading.Event(), Counter[str]()
    while not stop.is_set():
        close_lost_connections()  # drop connections that the database has closed
        if not process_batch(batch, stop, tally):
            break
    return tally


def process_batch(batch: int, stop: threading.Event, tally: Counter[str]) -> bool:
    """Claim what is due once, and handle it; whether there may be more."""
    claimed = claim(batch)
    left = deque(claimed)
    try:
        while left and not stop.is_set():
            message = left.popleft()
            with handling(INBOX.name, message.source, f"the message {message}"):
                tally[str(process(message))] += 1
    finally:
        with suppress(DatabaseFault):
            give_back(left)
    return bool(claimed)


def process(message: InboxMessage) -> MessageState:
    """Handle a claimed message, and note what came of it; its state now."""
    try:
        execution_of(message).run(claim_first=True)
    except NoReceiver as error:
        logger.error("The message %s of the inbox waits: %s", message, error)  # noqa: TRY400  # it says all there is
        return _again(message, str(error), _pause(message))
    except OperationInProgress as error:
        unbegun = {"attempts": F("attempts") - 1}
        return _again(message, message.error or IN_PROGRESS, error.remaining or 1.0, **unbegun)
    except UnknownEventType as error:
        if message.source.startswith(CONSUMER):
            return _dead(message, error)
        _warn_of_unhandled(message.source, message.type)
        return _over(message, MessageState.DISCARDED, NO_HANDLER)
    except (DeadLettered, FingerprintMismatch) as error:
        return _dead(message, error)
    except Exception as error:
        pause = _pause(message)
        logger.exception(
            "The message %s was not handled (attempt %d). Another attempt follows in %.0f seconds.",
            message,
            message.attempts,
            pause,
        )
        return _again(message, reason(error), pause)
    return _over(message, MessageState.DONE)


@lru_cache(maxsize=1000)  # once for each type
def _warn_of_unhandled(source: str, kind: str) -> None:
    logger.warning(
        "Messages of %s of the type %r are discarded, because this process has no handler for "
        "them. If a newer version has one, reprocess them in the admin.",
        source,
        kind,
    )


def _again(message: InboxMessage, error: str, pause: float, **changes: Any) -> MessageState:
    """Look at the message again after that many seconds."""
    due = DatabaseNow() + timedelta(seconds=pause)
    mark(message, error=error, process_after=due, **changes)
    return MessageState.PENDING


def _dead(message: InboxMessage, error: Exception) -> MessageState:
    """No further attempt follows without an operator."""
    logger.error("The message %s is a dead letter.", message, exc_info=error)
    cause = error.__cause__
    why = reason(cause) if cause else message.error or reason(error)
    mark(message, state=MessageState.DEAD, error=why, process_after=None)
    return MessageState.DEAD


def _over(message: InboxMessage, state: MessageState, error: str = "") -> MessageState:
    """The message was handled, or is not to be."""
    over = {"state": state, "error": error, "process_after": None}
    mark(message, **over, processed_at=DatabaseNow(), purge_at=purged(message))
    return state


def _pause(message: InboxMessage) -> float:
    """Seconds until the next attempt."""
    return BACKOFF.jittered(message.attempts).total_seconds()


def purged(message: InboxMessage) -> Any:
    """When a message may be purged that is done or discarded now."""
    receiver = receivers().get(message.source)
    ttl = receiver.ttl if receiver else timedelta(days=7)
    return None if ttl is None else DatabaseNow() + ttl
