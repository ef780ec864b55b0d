"""The tables of the app ``idempotency_django.contrib.messaging``."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.utils.translation import gettext_lazy as _

from ...models import ExactCharField

__all__ = ["InboxMessage", "OutboxMessage", "OutboxStream", "RunningProcess", "StreamPosition"]


class StreamPosition(models.Model):
    """The position of one stream. One row per stream, however many messages it has."""

    id = models.BigAutoField(primary_key=True)
    stream = ExactCharField(_("stream"), max_length=255, unique=True)
    # Raised by each new owner: writes of earlier owners then match no row.
    epoch = models.BigIntegerField(_("epoch"), default=0)
    # The offset of the last message whose effects are committed; -1: none yet.
    position = models.BigIntegerField(_("position"), default=-1)
    updated_at = models.DateTimeField(_("updated"))

    class Meta:
        verbose_name = _("stream position")
        verbose_name_plural = _("stream positions")

    def __str__(self) -> str:
        return str(self.stream)


class MessageState(models.TextChoices):
    """The states of a message, in the inbox and in the outbox."""

    PENDING = "pending", _("pending")  # due at process_after
    DONE = "done", _("done")  # handled, or sent
    DEAD = "dead", _("dead")  # a dead letter: no further attempt follows without an operator
    DISCARDED = "discarded", _("discarded")  # nothing was done, and nothing is to be done


class InboxMessage(models.Model):
    """A message that was received: verified, durable, and handled once."""

    id = models.BigAutoField(primary_key=True)
    # "stripe" for a webhook; "consumer:billing" for a dead letter of a consumer.
    source = ExactCharField(_("source"), max_length=150)
    message_id = ExactCharField(_("message id"), max_length=255)
    type = models.CharField(_("type"), max_length=255, default="", blank=True)
    headers = models.TextField(_("headers"), default="[]", blank=True)
    body = models.BinaryField(_("body"))
    digest = ExactCharField(_("digest"), max_length=64)
    # The digest again where the signature does not cover the id: no two messages have it. Null for
    # all others.
    unique_digest = ExactCharField(_("unique digest"), max_length=64, null=True, blank=True)
    state = models.CharField(
        _("state"), max_length=16, choices=MessageState, default=MessageState.PENDING
    )
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    # Null where nothing is to be done: the index leads to due messages.
    process_after = models.DateTimeField(_("process after"), null=True, blank=True)
    error = models.TextField(_("error"), default="", blank=True)
    # Of a consumer's dead letter: the reference of the record of the attempts at it, or of what its
    # event names as its cause if no handler was called; see records.reference().
    caused_by = ExactCharField(_("caused by"), max_length=511, default="", blank=True)
    received_at = models.DateTimeField(_("received"))
    processed_at = models.DateTimeField(_("processed"), null=True, blank=True)
    purge_at = models.DateTimeField(_("purged after"), null=True, blank=True)

    class Meta:
        verbose_name = _("inbox message")
        verbose_name_plural = _("inbox messages")
        constraints = [
            models.UniqueConstraint(
                fields=["source", "message_id"], name="idempotency_inbox_message_uniq"
            ),
            models.UniqueConstraint(
                fields=["unique_digest", "source"], name="idempotency_inbox_digest_uniq"
            ),
        ]
        # The queue's indexes are made in the migration: on PostgreSQL, they are partial.
        permissions = [
            ("view_body", _("Can see the bodies, headers and errors of inbox messages")),
            ("settle_message", _("Can retry, discard and reprocess inbox messages")),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} ({self.source})"


class OutboxStream(models.Model):
    """The numbers of one topic and group. Only writers touch it, so no relay waits for them."""

    stream = ExactCharField(_("stream"), max_length=255, primary_key=True)
    # Writers raise it, and hold the row until they commit: they commit in the order of the numbers.
    last_sequence = models.BigIntegerField(_("last sequence"), default=0)

    def __str__(self) -> str:
        return str(self.stream)


class OutboxMessage(models.Model):
    """A message that is published if, and only if, the transaction that wrote it was committed."""

    id = models.BigAutoField(primary_key=True)
    message_id = ExactCharField(_("message id"), max_length=255, unique=True)
    topic = ExactCharField(_("topic"), max_length=100)
    # Empty: published in no particular order.
    stream = ExactCharField(_("stream"), max_length=255, default="", blank=True)
    sequence = models.BigIntegerField(_("sequence"), default=0)
    type = models.CharField(_("type"), max_length=255)
    group = ExactCharField(_("group"), max_length=255, default="", blank=True)
    payload = models.TextField(_("payload"))
    state = models.CharField(
        _("state"), max_length=16, choices=MessageState, default=MessageState.PENDING
    )
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    # Null where nothing is to be done, or after an earlier message of its stream only: the index
    # then leads to due messages.
    process_after = models.DateTimeField(_("process after"), null=True, blank=True)
    token = ExactCharField(_("owner token"), max_length=32, default="", blank=True)
    error = models.TextField(_("error"), default="", blank=True)
    # The reference of the record whose handler published it; see records.reference().
    caused_by = ExactCharField(_("caused by"), max_length=511, default="", blank=True)
    # The topic and the dedup id, digested; null if there was none, or the message was discarded.
    dedup = ExactCharField(_("dedup id"), max_length=64, null=True, blank=True, unique=True)
    created_at = models.DateTimeField(_("created"))
    sent_at = models.DateTimeField(_("sent"), null=True, blank=True)
    purge_at = models.DateTimeField(_("purged after"), null=True, blank=True)

    class Meta:
        # Its indexes are made in the migration: on PostgreSQL, they are partial.
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        permissions = [
            ("view_outbox_payload", _("Can see the payloads of outbox messages")),
            ("settle_outbox", _("Can retry, discard and resend outbox messages")),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} ({self.topic})"


class RunningProcess(models.Model):
    """A process that runs until it is stopped. Its row is deleted when it ends in good order."""

    id = models.BigAutoField(primary_key=True)
    # What runs, such as "relay" or "inbox of stripe"; the same after a restart.
    name = models.CharField(_("name"), max_length=255)
    # Where: the host, and the number of the process there.
    process = models.CharField(_("process"), max_length=255)
    started_at = models.DateTimeField(_("started"))
    beat_at = models.DateTimeField(_("last sign of life"))

    class Meta:
        verbose_name = _("running process")
        verbose_name_plural = _("running processes")

    def __str__(self) -> str:
        return f"{self.name} ({self.process})"


# Django would take them for models of the app idempotency_django, which has no tables for them.
if not apps.is_installed("idempotency_django.contrib.messaging"):
    raise ImproperlyConfigured(
        "Streams, the webhook inbox and the outbox have tables of their own. Add "
        '"idempotency_django.contrib.messaging" to INSTALLED_APPS and run "manage.py migrate".'
    )
