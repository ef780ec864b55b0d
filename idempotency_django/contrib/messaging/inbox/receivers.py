"""The views that webhooks are delivered to."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeVar

from django.conf import settings
from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery
from django.http import HttpRequest, HttpResponse
from django.urls import get_resolver
from django.utils.crypto import salted_hmac
from django.views import View

from ....errors import IdempotencyError, StoreUnavailable
from ....http import INBOX, POLICY, problem_response
from ....models import DatabaseNow
from ....policy import Policy, keys, scopes
from ....stores import forbid_atomic_block
from ..consumers import Consumer
from ..databases import database
from ..events import Event
from ..models import InboxMessage, MessageState
from ..verifiers import Contents, Verifier

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


def known_digest(message: InboxMessage) -> str | None:
    """The digest of the message that has this source and id; ``None``: there is none."""
    rows = InboxMessage.objects.using(database())
    same = rows.filter(source=message.source, message_id=message.message_id)
    return same.values_list("digest", flat=True).first()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_RECEIVERS: Final[dict[str, dict[str, type[WebhookReceiver]]]] = {}
"""The receivers by source and path: one that is loaded again replaces itself."""


class _Handlers(Consumer):
    """The handlers of a receiver. The records of its messages have a scope of their own."""

    def _scope(self, source: str, sender: str) -> str:
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
        policy: the policy of the handlers; by default the project's.
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
        inherited = getattr(cls, "consumer", None)
        cls.consumer = _Handlers(
            cls.source, ttl=cls.ttl, max_attempts=cls.max_attempts, policy=cls.policy
        )
        if inherited:
            cls.consumer._handlers.update(inherited._handlers)
        _RECEIVERS.setdefault(cls.source, {})[f"{cls.__module__}.{cls.__qualname__}"] = cls

    @classmethod
    def on(cls, *types: str, steps: bool = False) -> Callable[[_Function], _Function]:
        """Register the decorated function for messages of these types; ``"*"``: of all others.

        As :meth:`.Consumer.on`. It is called with the
        :class:`~idempotency_django.contrib.messaging.Event`, whose data is the whole body, and, if
        it takes a second argument, the
        :class:`~idempotency_django.engine.context.ExecutionContext` of the attempt.
        """
        return cls.consumer.on(*types, steps=steps)

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """The view. Its message is its own protection, and its INSERT its own transaction."""
        view: Any = super().as_view(**initkwargs)
        view.csrf_exempt = True  # the signature says who sent it
        setattr(view, POLICY, None)  # for the middleware
        setattr(view, INBOX, True)
        for using in connections:
            transaction.non_atomic_requests(using)(view)
        return view  # type: ignore[no-any-return]

    def group(self, event: Event) -> str | None:
        """The ordering group of the message: earlier messages of the same group are handled first.

        Override it where the order matters; empty or ``None``: in no particular order. If it
        raises, nothing is stored, and the sender delivers the message again.
        """
        return ""

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
            logger.info("A delivery of %s was refused: %s", self.source, error)
            return problem_response(error)
        return HttpResponse(status=200)

    def _receive(self, request: HttpRequest) -> None:
        """Commit the message, unless it was before."""
        forbid_atomic_block(database(), f"A message of {self.source!r}")
        body = request.body
        self.verifier.verify(request.headers, body)
        contents = self.verifier.read(request.headers, body)
        message = self._message(contents, request, body)
        if not self.verifier.signs_id:
            message.unique_digest = message.digest
        if insert(message):
            return
        known = known_digest(message)
        if known == message.digest:
            return  # it is delivered again
        if known is None and self.verifier.signs_id:
            insert(message)  # the existing message has been purged since
            return
        message_id = message.message_id
        if known is not None:
            # Keyed: who may list the messages may not test guesses at their bodies.
            suffix = salted_hmac(__name__, message.digest, algorithm="sha256").hexdigest()
            message.message_id = keys.fit(f"{message_id}#{suffix}")
            why = "An earlier message had this id with another body."
        else:  # it may be an attacker's replay
            why = (
                "An earlier message had this body with another id, and the signature does not "
                "cover the id."
            )
        if self._suspect(message, why):
            logger.warning(
                "The message %s of %s is a dead letter. %s Accept it in the admin if both are "
                "genuine.",
                message_id,
                self.source,
                why,
            )

    def _suspect(self, message: InboxMessage, why: str) -> bool:
        """Store the message for an operator to accept; ``False``: it is already stored."""
        message.unique_digest, message.state = None, MessageState.DEAD
        message.is_suspect, message.error = True, why
        message.process_after = None
        message.stream = ""  # until it is accepted: it holds up no genuine message
        if not self.verifier.signs_id and self.ttl:  # an attacker can send any number of them
            message.purge_at = DatabaseNow() + self.ttl
        return insert(message)

    def _message(self, contents: Contents, request: HttpRequest, body: bytes) -> InboxMessage:
        same = body if contents.same is None else contents.same
        given = self.group(event_of(self.source, contents))
        group = "" if given is None else scopes.fit(str(given))
        kept = [(k, v) for k, v in request.headers.items() if k.lower() not in _SECRET_HEADERS]
        return InboxMessage(
            source=self.source,
            message_id=keys.fit(contents.message_id),
            type=contents.type,
            group=group,
            stream=stream_of(self.source, group),
            headers=json.dumps(kept),
            body=body,
            digest=hashlib.sha256(same).hexdigest(),
            process_after=DatabaseNow(),
            received_at=DatabaseNow(),
        )


def stream_of(source: str, group: str) -> str:
    """The name of a source's group in the queue; empty: the message has no group."""
    return f"{source}/{group}" if group else ""


def event_of(source: str, contents: Contents) -> Event:
    """The event that a handler gets."""
    return Event(id=contents.message_id, source=source, type=contents.type, data=contents.data)


def receivers() -> dict[str, list[type[WebhookReceiver]]]:
    """The receivers by source; more than one of a source is a mistake, which a check reports.

    The URLs are imported first, as they import the views and these their handlers.
    """
    if getattr(settings, "ROOT_URLCONF", None):
        get_resolver().url_patterns  # noqa: B018  # it imports
    return {source: [*known.values()] for source, known in _RECEIVERS.items()}


def receiver_of(source: str) -> type[WebhookReceiver] | None:
    """The receiver of that source; ``None``: no URL leads to any."""
    if source not in _RECEIVERS:
        receivers()
    return next(reversed(_RECEIVERS.get(source, {}).values()), None)
