"""The table of the database store, its queryset, and its clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Final

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.db.models.functions import Left, Now
from django.utils.translation import gettext_lazy as _

from .stores.records import ORIGIN_LENGTH, Status

if not apps.is_installed("idempotency_django"):
    raise ImproperlyConfigured(
        'The records of idempotency_django have tables of their own. Add "idempotency_django" to '
        'INSTALLED_APPS and run "manage.py migrate".'
    )

BATCH_SIZE: Final = 5_000
"""The records of one batch of a purge. A larger batch is hardly faster, and locks for longer."""

UNIQUE_KEY: Final = "idempotency_key_scope_uniq"
"""The name of the constraint that makes two owners of a key impossible."""

KEPT_ATTEMPTS: Final = 20
"""The most attempts at one operation that are kept for the audit, besides the last one."""
_KEPT_ERROR: Final = 1_000  # characters

INTERRUPTED: Final = "interrupted"
"""What an attempt is whose lease is over, for people and in ``attempts``; no status of a row."""

NO_OWNER: Final = Left("owner_token", ORIGIN_LENGTH)
"""The token of a row whose owner is late or dead: no owner has it, and the next token has it as its
prefix.
"""


class DatabaseNow(Now):
    """The database's clock when the statement starts; UTC where columns know no time zone.

    Django's own ``Now`` gives the session's local time on MySQL and MariaDB, while Django stores
    UTC there.
    """

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **extra)


def unlocked(rows: models.QuerySet[Any, Any]) -> models.QuerySet[Any, Any]:
    """Locks the rows that no other transaction has locked, where the database can skip those."""
    skip = connections[rows.db].features.has_select_for_update_skip_locked
    return rows.select_for_update(skip_locked=skip)


class ExactCharField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at runtime
    """ASCII characters that are compared byte by byte.

    MySQL and MariaDB compare text without regard to case by default: ``user:Bob`` would receive
    the responses of ``user:bob``. PostgreSQL sorts it by the rules of a language, which cannot find
    a prefix in an index, and may change with the operating system underneath a unique index.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        declared = super().db_type(connection)
        if connection.vendor == "mysql":
            return f"{declared} CHARACTER SET ascii COLLATE ascii_bin"
        if connection.vendor == "postgresql":
            return f'{declared} COLLATE "C"'
        return declared


class IdempotencyKeyQuerySet(models.QuerySet["IdempotencyKey"]):
    """The queries of operators on the records."""

    def interrupted(self) -> IdempotencyKeyQuerySet:
        """The records in progress whose owner is dead, or late: their lease is over."""
        return self.filter(lease_expires_at__lte=DatabaseNow(), status=Status.IN_PROGRESS)

    def held(self) -> IdempotencyKeyQuerySet:
        """The interrupted records that no retry resumes until an operator settles them."""
        return self.interrupted().filter(hold=True)

    def purgeable(self, older_than: timedelta = timedelta(0)) -> IdempotencyKeyQuerySet:
        """The records past their time to live and retention for longer than ``older_than``.

        Records in progress are among them only if they were interrupted and are not held.
        """
        abandoned = Q(lease_expires_at__lte=DatabaseNow(), hold=False)
        return self.filter(
            ~Q(status=Status.IN_PROGRESS) | abandoned, purge_at__lte=DatabaseNow() - older_than
        )

    def ended_attempts(self) -> list[dict[str, Any]]:
        """The attempts at the one record among these, which have ended, for its ``attempts``."""
        row = self.values(
            *("attempts", "attempt", "status", "error"),
            *("created_at", "completed_at", "lease_expires_at"),
        ).get()
        is_interrupted = row["status"] == Status.IN_PROGRESS
        ended = row["completed_at"] or row["lease_expires_at"] or row["created_at"]
        last = {
            "attempt": row["attempt"],
            "state": INTERRUPTED if is_interrupted else row["status"],
            "error": row["error"][:_KEPT_ERROR],
            "began": row["created_at"].isoformat(),
            "ended": ended.isoformat(),
        }
        return [*(row["attempts"] or ()), last][-KEPT_ATTEMPTS:]


class IdempotencyKey(models.Model):
    """The record of one operation: the row of ``(key, scope)``."""

    id = models.BigAutoField(primary_key=True)
    key = ExactCharField(_("key"), max_length=255)
    scope = ExactCharField(_("scope"), max_length=255)
    operation = models.CharField(_("operation"), max_length=255)
    # Hex, because a binary column reads back as a memoryview under psycopg2 and equals nothing.
    fingerprint = ExactCharField(_("fingerprint"), max_length=64)
    status = models.CharField(
        _("status"),
        max_length=16,
        choices=[
            (Status.IN_PROGRESS.value, _("in progress")),
            (Status.COMPLETED.value, _("completed")),
            (Status.FAILED.value, _("failed")),
        ],
    )
    attempt = models.PositiveIntegerField(_("attempt"), default=1)
    owner_token = ExactCharField(_("owner token"), max_length=32)
    lease_expires_at = models.DateTimeField(_("lease ends"), null=True, blank=True)
    # Whether an operator must settle it when its lease ends while it is in progress.
    hold = models.BooleanField(_("held when interrupted"), default=False, db_default=False)
    # Whether it may have had effects under derived keys: no other request gets the key then.
    pinned = models.BooleanField(_("kept for its request"), default=False, db_default=False)

    # Headers and body as stores.records.encode() writes them.
    response_status = models.PositiveSmallIntegerField(_("response status"), null=True, blank=True)
    response_headers = models.TextField(_("response headers"), default="[]", blank=True)
    response_body = models.BinaryField(_("response body"), null=True, blank=True)
    error = models.TextField(_("error"), default="", blank=True)

    # The attempts before the last one, as ended_attempts() tells them; NULL: there was none.
    attempts = models.JSONField(_("earlier attempts"), null=True, blank=True)

    created_at = models.DateTimeField(_("created"))
    completed_at = models.DateTimeField(_("completed"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    # expires_at plus the policy's retention. Purging goes by this column, so it has the index.
    purge_at = models.DateTimeField(_("purged after"), null=True, blank=True)

    replay_count = models.PositiveIntegerField(_("replays"), default=0)
    last_replayed_at = models.DateTimeField(_("last replayed"), null=True, blank=True)
    principal = models.CharField(_("principal"), max_length=255, default="", blank=True)
    method = models.CharField(_("method"), max_length=16, default="", blank=True)
    path = models.TextField(_("path"), default="", blank=True)
    # The reference of the record whose handler caused this operation; see records.reference().
    caused_by = ExactCharField(
        _("caused by"), max_length=511, default="", db_default="", blank=True
    )

    objects: ClassVar[models.Manager[IdempotencyKey]] = models.Manager.from_queryset(
        IdempotencyKeyQuerySet
    )()

    class Meta:
        verbose_name = _("idempotency key")
        verbose_name_plural = _("idempotency keys")
        constraints = [models.UniqueConstraint(fields=["key", "scope"], name=UNIQUE_KEY)]
        # The migration makes partial indexes on lease_expires_at and caused_by; declared here, they
        # would make `migrate` warn on MySQL and MariaDB, which have no partial indexes.
        indexes = [models.Index(fields=["purge_at"], name="idempotency_purge_at_idx")]
        permissions = [
            ("view_response", _("Can see the stored responses of idempotency keys")),
            ("settle", _("Can settle interrupted idempotency keys")),
        ]

    def __str__(self) -> str:
        return f"{self.key} ({self.scope})"


STEPS_INDEX: Final = "idempotency_step_record_idx"


class IdempotencyStep(models.Model):
    """A recovery point: a step of one operation, kept as long as its record."""

    id = models.BigAutoField(primary_key=True)
    # Without a constraint in the database, which a purge would check row by row. A step is only
    # ever written under the lock of its record.
    record = models.ForeignKey(
        IdempotencyKey,
        verbose_name=_("idempotency key"),
        on_delete=models.CASCADE,
        related_name="steps",
        db_index=False,
        db_constraint=False,
    )
    name = models.CharField(_("name"), max_length=100)
    attempt = models.PositiveIntegerField(_("attempt"))
    result = models.TextField(_("result"))
    completed_at = models.DateTimeField(_("completed"))

    class Meta:
        verbose_name = _("idempotency step")
        verbose_name_plural = _("idempotency steps")
        ordering = ("record", "id")
        indexes = [models.Index(fields=["record"], name=STEPS_INDEX)]
        # Steps contain providers' responses; they are shown with the key, with its permission.
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
