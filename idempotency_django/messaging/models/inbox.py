"""The table of the inbox: what was received, verified, and is to be handled once."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ...models import ExactCharField


class InboxState(models.TextChoices):
    """Where a message of the inbox is on its way."""

    PENDING = "pending", _("pending")  # due at process_after
    HANDLED = "handled", _("handled")
    IGNORED = "ignored", _("ignored")  # no handler for its type
    HELD = "held", _("held")  # an operator must say whether to handle it
    PARKED = "parked", _("parked")  # its attempts are used up: an operator must retry it


class InboxMessage(models.Model):
    """A message that was received: verified, durable, and handled once."""

    id = models.BigAutoField(primary_key=True)
    # "stripe" for a webhook; "consumer:billing" for a message that a consumer has parked.
    source = ExactCharField(_("source"), max_length=150)
    message_id = ExactCharField(_("message id"), max_length=255)
    type = models.CharField(_("type"), max_length=255, default="", blank=True)
    # Messages of one group are handled one after the other, in the order they came in.
    group = ExactCharField(_("group"), max_length=255, default="", blank=True)
    headers = models.TextField(_("headers"), default="[]", blank=True)
    body = models.BinaryField(_("body"))
    digest = ExactCharField(_("digest"), max_length=64)
    # The digest again where the signature does not cover the id: no two messages have it that are
    # handled without an operator. Null for all others.
    unique_digest = ExactCharField(_("unique digest"), max_length=64, null=True, blank=True)
    state = models.CharField(
        _("state"), max_length=16, choices=InboxState, default=InboxState.PENDING
    )
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    # Null where nothing is to be done, or after an earlier message of its group only: the index
    # then leads to what is due.
    process_after = models.DateTimeField(_("process after"), null=True, blank=True)
    error = models.TextField(_("error"), default="", blank=True)
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
        indexes = [
            models.Index(fields=["process_after"], name="idempotency_inbox_due_idx"),
            # For the messages before and after one of a group. PostgreSQL has an expression in
            # place of the id; see the migration.
            models.Index(
                fields=["group", "source", "state", "id"], name="idempotency_inbox_order_idx"
            ),
            models.Index(fields=["purge_at"], name="idempotency_inbox_purge_idx"),
            # For the admin, which lists the newest first.
            models.Index(fields=["received_at"], name="idempotency_inbox_received_idx"),
        ]
        permissions = [
            ("view_body", _("Can see the bodies, headers and errors of inbox messages")),
            ("settle_message", _("Can retry, reprocess and accept inbox messages")),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} ({self.source})"
