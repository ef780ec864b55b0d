"""The database store with a cache in front of it: a replay costs no statement."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import compress
from typing import Any, ClassVar, Final, NoReturn

from django.conf import settings
from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.db import Error as DatabaseFault
from django.db import connections, transaction

from ..conf import seconds_of
from ..errors import StoreUnavailable
from ..stores import (
    Claim,
    DatabaseStore,
    Operation,
    Payload,
    Record,
    Status,
    decode,
    encode,
    templates,
)

logger = logging.getLogger("idempotency_django")


class FailoverEpoch:
    """The database's failover epoch (its timeline), as known to this process.

    One object serves all threads. It asks rarely, so it may be out of date. That is safe, because a
    history that has ended never comes back.

    Args:
        using: the database, by its alias in ``DATABASES``.
        recheck: how long the database's reply is used; ``None``: never ask, every
            history counts as the same.
    """

    def __init__(self, using: str, recheck: timedelta | None) -> None:
        self._using = using
        self._recheck = (
            None if recheck is None else seconds_of("recheck", recheck, may_be_zero=True)
        )
        self._known: tuple[str, float] | None = None
        self.forget()

    @property
    def last_known(self) -> str | None:
        """The epoch when this process last asked; ``None``: unknown."""
        return None if self._known is None else self._known[0]

    def current(self) -> str | None:
        """The epoch now, asked for no longer ago than ``recheck``; ``None``: unknown."""
        known = self._known
        if known is None or time.monotonic() - known[1] >= (self._recheck or 0):
            known = self._known = self._ask()
        return None if known is None else known[0]

    def forget(self) -> None:
        """Ask at the next use: the database was unreachable, so it may be another one now."""
        self._known = None if self._recheck is not None else ("", float("inf"))

    def _ask(self) -> tuple[str, float] | None:
        connection, asked_at = connections[self._using], time.monotonic()
        question = templates(connection.vendor).get("failover_epoch")
        if question is None:  # SQLite has no other server
            return "", float("inf")
        within = connection.in_atomic_block  # which a failure here must not spoil
        try:
            with (
                transaction.atomic(using=self._using) if within else nullcontext(),
                connection.cursor() as cursor,
            ):
                cursor.execute(question)
                return str(cursor.fetchone()[0]), asked_at
        except DatabaseFault:
            logger.warning(
                "The timeline of the database %r cannot be queried, so cached results are not "
                "used. If its user lacks the permission, grant it pg_control_system(). Or set the "
                "store's recheck to None: cached results may then outlive a fail-over.",
                self._using,
                exc_info=True,
            )
            if not within:
                connection.close_if_unusable_or_obsolete()
            return None


def encode_record(record: Record, epoch: str, lifetime: float | None) -> bytes:
    """The entry of a completed record that was stored in an epoch of the database.

    Args:
        record: the record.
        epoch: the epoch.
        lifetime: seconds until the record expires; ``None``: it does not.
    """
    assert record.payload is not None  # noqa: S101  # a completed record has one
    answer = encode(record.payload)
    head = [record.key, record.scope, record.attempt, record.fingerprint]
    head += [answer.status, answer.headers, answer.body is not None, record.record_id, epoch]
    head.append(None if lifetime is None else time.time() + lifetime)
    return json.dumps(head).encode() + b"\n" + (answer.body or b"")


def decode_record(cached: Any, operation: Operation, epoch: str) -> Record | None:
    """The record of the operation, if it was cached in the epoch; else ``None``."""
    try:
        head, _, body = cached.partition(b"\n")
        key, scope, attempt, fingerprint, status, headers, *rest = json.loads(head)
        has_body, record_id, cached_on, expires = (*rest, None)[:4]  # None: by an older release
        payload = decode(status, headers, body if has_body else None)
    except (AttributeError, TypeError, ValueError):
        logger.warning(
            "The cache entry for %s is not a stored result. The database is used instead.",
            operation.key,
        )
        return None
    if (key, scope, cached_on) != (operation.key, operation.scope, epoch):
        return None
    return Record(
        key=key,
        scope=scope,
        status=Status.COMPLETED,
        attempt=attempt,
        fingerprint=fingerprint,
        payload=payload,
        ttl_left=None if expires is None else max(0.0, expires - time.time()),
        counted=True,
        record_id=record_id,
    )


FORGOTTEN: Final = b""
"""The marker that replaces a removed result, so that a request in progress cannot cache it
again.
"""

_OWN_MEMORY: Final = ("LocMemCache", "DummyCache")


class CachedStore(DatabaseStore):
    """The database is the truth; completed answers are read through one of Django's caches.

    An answer is put into the cache after the commit that stored it, and never stays there longer
    than its record lives. Replays from the cache are not counted. Records whose time to live counts
    from their last use are not cached. If the cache fails, the fault is logged and the database
    answers.

    An answer is bound to the timeline of the database that stored it. After a fail-over to a
    replica that had not received the answer, the answer is replayed for ``recheck`` seconds at
    most. Then the operation is executed again, like everything else that the database has lost.
    PostgreSQL numbers its timelines; MariaDB and MySQL do not, so there an answer is bound to the
    server itself. No database can detect that a backup was restored in place: clear the cache when
    you do so.

    One cache may serve several databases, and the schemas of django-tenants. If your project
    switches ``search_path`` in another way, give the cache a ``KEY_FUNCTION`` that names the
    schema.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        using: as for :class:`~idempotency_django.stores.database.DatabaseStore`.
        combine_statements: likewise.
        cache: the cache, by its alias in ``CACHES``. All processes must share it.
        max_age: how long an answer is cached at most. A record that is deleted while
            the cache cannot be reached may be replayed for this long.
        prefix: the prefix of the names in the cache.
        recheck: how long a process assumes that the database has not failed over. It costs
            one statement in this time, and only if something is replayed. ``None``: the
            database is not asked, and an answer that it lost may be replayed for ``max_age``.
    """

    recalls: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        *,
        using: str = "default",
        combine_statements: bool = True,
        cache: str = "default",
        max_age: timedelta = timedelta(minutes=10),
        prefix: str = "idempotency",
        recheck: timedelta | None = timedelta(seconds=5),
    ) -> None:
        super().__init__(alias, using=using, combine_statements=combine_statements)
        self.cache = cache
        self.max_age = seconds_of("max_age", max_age)
        self.prefix = prefix
        self._epoch = FailoverEpoch(using, recheck)

    def recall(self, operation: Operation) -> Record | None:
        if operation.extend_on_replay:
            return None
        try:
            cached = caches[self.cache].get(self._name(operation.key, operation.scope))
        except Exception:
            logger.warning("The cache %r of results cannot be read.", self.cache, exc_info=True)
            return None
        if not cached:
            return None
        epoch = self._epoch.current()
        return None if epoch is None else decode_record(cached, operation, epoch)

    def forget(self, key: str, scope: str) -> None:
        try:
            caches[self.cache].set(self._name(key, scope), FORGOTTEN, int(self.max_age))
        except Exception:
            logger.exception(
                "The cached result of %s could not be removed. It may be replayed for up to %d "
                "seconds.",
                key,
                self.max_age,
            )

    def acquire(self, operation: Operation) -> Claim | Record:
        asked_at, epoch = time.monotonic(), self._epoch.last_known
        claim_or_record = super().acquire(operation)
        if (
            isinstance(claim_or_record, Record)
            and claim_or_record.status is Status.COMPLETED
            and not claim_or_record.expired
        ):
            if epoch is None:  # what is asked only now may be newer than what was read
                self._epoch.current()
                return claim_or_record
            # Its own transaction may have stored it, and may still roll back.
            self.on_commit(lambda: self._remember(claim_or_record, asked_at, epoch))
        return claim_or_record

    def complete(self, claim: Claim, payload: Payload) -> bool:
        epoch = self._epoch_before()
        completed = super().complete(claim, payload)
        if completed:
            self._remember_completed(claim, payload, epoch)
        return completed

    def complete_many(self, answers: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        epoch = self._epoch_before() if answers else None
        completed = super().complete_many(answers)
        for answer in compress(answers, completed):
            self._remember_completed(*answer, epoch)
        return completed

    def _epoch_before(self) -> str | None:
        """An epoch that is no newer than the commit that is to come."""
        known = self._epoch.last_known
        return self._epoch.current() if known is None else known

    def _remember_completed(self, claim: Claim, payload: Payload, epoch: str | None) -> None:
        ttl = claim.operation.ttl
        record = Record(
            key=claim.key,
            scope=claim.scope,
            status=Status.COMPLETED,
            attempt=claim.attempt,
            fingerprint=claim.operation.fingerprint,
            payload=payload,
            ttl_left=None if ttl is None else ttl.total_seconds(),
            record_id=claim.record_id,
        )
        self.on_commit(lambda: self._remember(record, claim.asked_at, epoch))

    def check(self) -> Sequence[CheckMessage]:
        return [*super().check(), *self._check_cache()]

    def _check_cache(self) -> Iterator[CheckMessage]:
        if self.cache not in settings.CACHES:
            yield Error(
                f"The store {self.alias!r} uses the cache {self.cache!r}, which is not in CACHES.",
                hint=f"CACHES has: {', '.join(map(repr, settings.CACHES))}.",
                id="idempotency_django.E013",
            )
        elif str(settings.CACHES[self.cache].get("BACKEND", "")).endswith(_OWN_MEMORY):
            yield Warning(
                f"The store {self.alias!r} uses the cache {self.cache!r}, which is local to each "
                "process.",
                hint=(
                    "Other processes would still replay a result that one process deletes. Use a "
                    "shared cache, such as Redis."
                ),
                id="idempotency_django.W018",
            )

    def _raise(self, error: DatabaseFault) -> NoReturn:
        try:
            super()._raise(error)
        except StoreUnavailable:
            self._epoch.forget()
            raise

    def _remember(self, record: Record, since: float, epoch: str | None) -> None:
        """Cache a committed answer for the rest of its time to live at that moment."""
        if epoch is None:
            return
        # From that moment for both: what was forgotten since stays forgotten for max_age.
        elapsed, lifetime, left = time.monotonic() - since, self.max_age, record.ttl_left
        if left is not None:
            lifetime = min(lifetime, left - 1)  # as clocks do not run alike
            left -= elapsed
        lifetime -= elapsed
        if lifetime < 1:
            return
        name = self._name(record.key, record.scope)
        try:
            # Only where nothing is: what was forgotten meanwhile must stay so.
            caches[self.cache].add(name, encode_record(record, epoch, left), int(lifetime))
        except Exception:
            logger.warning("A result could not be cached in %r.", self.cache, exc_info=True)

    def _name(self, key: str, scope: str) -> str:
        connection = connections[self.using]
        # One cache may serve several databases, and django-tenants' schemas of one.
        where = f"{connection.settings_dict['NAME']}:{getattr(connection, 'schema_name', '')}"
        parts = f"{len(where)}:{where}{len(key)}:{key}{scope}"
        return f"{self.prefix}:{self.alias}:{hashlib.sha256(parts.encode()).hexdigest()}"
