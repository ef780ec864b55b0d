"""The views that webhooks are delivered to."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeVar

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.urls import get_resolver
from django.utils.crypto import salted_hmac
from django.views import View

from ...errors import DeliveryMalformed, IdempotencyError
from ...http.atomic_requests import own
from ...http.declared import EXEMPT
from ...http.messages import problem_response
from ...models import DatabaseNow
from ...policy import Policy, keys, scopes
from ..events import Event
from ..handling import Handler
from ..models import InboxMessage
from ..models.inbox import InboxState
from ..policies import refuse_types, refuse_unfit
from .deliveries import kept_headers, read_body
from .inserting import insert, known_digest
from .verifiers import Contents, Verifier

logger = logging.getLogger("idempotency_django")

ANY: Final = "*"
"""The type that a handler is registered for that takes what has no other handler."""

_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_Handler = TypeVar("_Handler", bound=Handler)
_RECEIVERS: Final[dict[str, list[type[WebhookReceiver]]]] = {}


class WebhookReceiver(View):
    """Stores each verified delivery, answers, and has it handled once, later. ::

        class StripeHook(WebhookReceiver):
            source = "stripe"
            verifier = Stripe(lambda: settings.STRIPE_SECRETS)

        @StripeHook.on("invoice.paid")
        def paid(event, execution):
            Invoice.objects.filter(number=event.data["data"]["object"]["id"]).update(paid=True)

        urlpatterns = [path("webhooks/stripe/", StripeHook.as_view())]

    A delivery is answered with 200 when it is committed, or was before. ``manage.py
    process_inbox`` calls the handlers.

    Attributes:
        source: who sends: letters, digits and ``_.-``. Under another name, all would be new.
        verifier: tells the sender's deliveries from others.
        ttl: how long a handled message is remembered, which must be longer than the sender may
            deliver it again; ``None``: forever.
        max_attempts: how many attempts at a message may fail before it is parked; ``None``: all.
        policy: the policy of the handlers, for example ``Policy(mode="leased")`` where they have
            steps; by default the project's.
        max_body_bytes: a larger body is refused. ``DATA_UPLOAD_MAX_MEMORY_SIZE`` does not apply.
        parked_blocks_group: whether a parked message holds up the later ones of its group.
    """

    source: ClassVar[str] = ""
    verifier: ClassVar[Verifier]
    ttl: ClassVar[timedelta | None] = timedelta(days=7)
    max_attempts: ClassVar[int | None] = 10
    policy: ClassVar[Policy | None] = None
    max_body_bytes: ClassVar[int] = 5 * 1024 * 1024
    parked_blocks_group: ClassVar[bool] = True

    http_method_names = ["post"]
    _handlers: ClassVar[dict[str, Handler]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._handlers = dict(cls._handlers)
        if "source" not in vars(cls):
            return
        if not _SOURCE.fullmatch(cls.source):
            raise ImproperlyConfigured(
                f"The source of {cls.__qualname__} is {cls.source!r}. Give it 1 to 100 letters, "
                "digits and the characters '_', '.' and '-', such as 'stripe'."
            )
        others = [other for other in _RECEIVERS.get(cls.source, ()) if not _is_same(other, cls)]
        _RECEIVERS[cls.source] = [*others, cls]

    @classmethod
    def on(cls, *types: str) -> Callable[[_Handler], _Handler]:
        """Register the decorated function for messages of these types; ``"*"``: of all others.

        It is called with the :class:`~idempotency_django.messaging.events.Event`, whose data is
        the whole body, and the :class:`~idempotency_django.engine.context.ExecutionContext` of the
        attempt. It returns what JSON can say.

        Raises:
            ValueError: no type is given, or one of them has a handler already.
            TypeError: a type is not a text.
            ImproperlyConfigured: the function cannot be called so, or is async.
        """
        refuse_types(types, f"the receiver {cls.__qualname__}")
        for taken in cls._handlers.keys() & {*types}:
            raise ValueError(
                f"{cls.__qualname__} already has a handler for {taken!r}. Let one handler call "
                "both functions."
            )

        def register(handler: _Handler) -> _Handler:
            refuse_unfit(handler, f"the receiver {cls.__qualname__}")
            if iscoroutinefunction(handler):
                raise ImproperlyConfigured(
                    f"The handler {handler} of {cls.__qualname__} is async. Make it a plain "
                    "function, which may use async_to_sync()."
                )
            cls._handlers.update(dict.fromkeys(types, handler))
            return handler

        return register

    @classmethod
    def handler_of(cls, type: str) -> Handler | None:  # noqa: A002  # CloudEvents' name for it
        """The handler of messages of this type; ``None``: they are ignored."""
        return cls._handlers.get(type) or cls._handlers.get(ANY)

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """The view. Its message is its own protection, and its INSERT its own transaction."""
        view: Any = super().as_view(**initkwargs)
        view.csrf_exempt = True  # the signature says who sent it
        setattr(view, EXEMPT, True)
        own(view)
        return view  # type: ignore[no-any-return]

    def group(self, event: Event) -> str | None:
        """What the message is handled in order with: the earlier ones of the same group come first.

        Override it where the order matters; empty or ``None``: in no particular order. If it
        raises, that is logged, and the message is stored without a group.
        """
        return ""

    def nudge(self) -> None:
        """Called when a message was committed, before the sender is answered.

        Override it to have messages processed soon, for example by
        :func:`idempotency_django.messaging.tasks.nudge`. If it raises, that is logged, and the
        message is processed all the same.
        """

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Verify and store a delivery."""
        try:
            stored = self._receive(request)
        except IdempotencyError as error:
            # One that cannot be understood is the fault of neither a stranger nor the message.
            level = logging.WARNING if isinstance(error, DeliveryMalformed) else logging.INFO
            logger.log(level, "A delivery of %s was refused: %s", self.source, error)
            response = problem_response(error)
            if response.status_code == 401:
                response["WWW-Authenticate"] = "Signature"  # RFC 9110 wants a scheme
            return response
        if stored:
            try:
                self.nudge()
            except Exception:
                logger.exception(
                    "The nudge of %s failed; its message is handled later.", self.source
                )
        return HttpResponse(status=200)

    def _receive(self, request: HttpRequest) -> bool:
        """Whether the message is new, and committed."""
        body = read_body(request, self.max_body_bytes)
        self.verifier.verify(request.headers, body)
        contents = self.verifier.read(request.headers, body)
        message = self._message(contents, request, body)
        if not self.verifier.signs_id:
            message.unique_digest = message.digest
        if insert(message):
            return True
        known = known_digest(message)
        if known == message.digest:
            return False  # it is delivered again
        if known is None and self.verifier.signs_id:
            return insert(message)  # the one that was there has been purged since
        message_id = message.message_id
        if known is not None:
            # Keyed: who may list the messages may not test guesses at their bodies.
            suffix = salted_hmac(__name__, message.digest, algorithm="sha256").hexdigest()
            message.message_id = keys.fit(f"{message_id}#{suffix}")
            message.error = "A message with this id has come with another body before."
            if self._hold(message):
                logger.warning(
                    "The message %s of %s has come with another body than before, which is held. "
                    "Accept it in the admin if both are genuine.",
                    message_id,
                    self.source,
                )
        elif self._hold(message):  # it may be somebody's replay
            logger.warning(
                "The message %s of %s is held: there is one with the same body and another id, "
                "which the signature does not cover. Accept it in the admin if both are genuine.",
                message_id,
                self.source,
            )
        return False

    def _hold(self, message: InboxMessage) -> bool:
        """Store the message for an operator to accept; ``False``: it is there already."""
        message.unique_digest, message.state = None, InboxState.HELD
        message.process_after = None
        if not self.verifier.signs_id and self.ttl:  # anybody can send any number of them
            message.purge_at = DatabaseNow() + self.ttl
        return insert(message)

    def _group(self, contents: Contents) -> str:
        try:
            group = self.group(event_of(self.source, contents))
            return "" if group is None else scopes.fit(str(group))
        except Exception:
            logger.exception(
                "The group() of %s has failed for the message %s, which is stored without a group, "
                "in no particular order. Correct group().",
                self.source,
                contents.message_id,
            )
            return ""

    def _message(self, contents: Contents, request: HttpRequest, body: bytes) -> InboxMessage:
        return InboxMessage(
            source=self.source,
            message_id=keys.fit(contents.message_id),
            type=contents.type,
            group=self._group(contents),
            headers=json.dumps(kept_headers(request)),
            body=body,
            digest=hashlib.sha256(body if contents.same is None else contents.same).hexdigest(),
            process_after=DatabaseNow(),
            received_at=DatabaseNow(),
        )


def event_of(source: str, contents: Contents) -> Event:
    """The event that a handler gets."""
    return Event(id=contents.message_id, source=source, type=contents.type, data=contents.data)


def receivers() -> dict[str, list[type[WebhookReceiver]]]:
    """The receivers by source; more than one of a source is a mistake, which a check reports.

    The URLs are imported first, as they import the views and these their handlers.
    """
    get_resolver().url_patterns  # noqa: B018  # it imports
    return _RECEIVERS


def receiver_of(source: str) -> type[WebhookReceiver] | None:
    """The receiver of that source; ``None``: no URL leads to any."""
    known = _RECEIVERS.get(source) or receivers().get(source)
    return known[-1] if known else None


def _is_same(one: type, other: type) -> bool:
    """Whether a class is another one made again, as by a reload."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
