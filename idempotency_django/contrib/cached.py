"""The database store with a cache in front of it: a replay costs no statement."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from django.conf import settings
from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.db import connections

from ..conf import seconds_of
from ..stores import (
    Claim,
    DatabaseStore,
    Operation,
    Payload,
    Record,
    Status,
    decode,
    encode,
)

logger = logging.getLogger("idempotency_django")


def decode_record(cached: Any) -> Record:
    """The completed record of an entry, as ``_remember()`` writes it."""
    key, scope, attempt, fingerprint, record_id, expires, *stored = cached
    return Record(
        key=key,
        scope=scope,
        status=Status.COMPLETED,
        attempt=attempt,
        fingerprint=fingerprint,
        payload=decode(*stored),
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
    """The database is the truth; completed responses are read through one of Django's caches.

    A response is put into the cache after the commit that stored it, or that replayed it from the
    database, and never stays there longer than its record lives. Those of a batch are not cached.
    Replays from the cache are not counted. Records whose time to live counts
    from their last use are not cached. If the cache fails, the fault is logged and the database is
    asked.

    After a fail-over to a replica that had not received a response, or a restored backup, the
    response is replayed for ``max_age`` at most, although its effects are gone: clear the cache.

    One cache may serve several databases, if their ``NAME`` differs, and the schemas of
    django-tenants. If your project switches ``search_path`` in another way, give the cache a
    ``KEY_FUNCTION`` that names the schema.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        using: as for :class:`~idempotency_django.stores.database.DatabaseStore`.
        combine_statements: likewise.
        cache: the cache, by its alias in ``CACHES``. All processes must share it.
        max_age: how long a response is cached at most. A record that is deleted while
            the cache cannot be reached, or lost by the database, may be replayed for this long.
    """

    has_cache: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        *,
        using: str = "default",
        combine_statements: bool = True,
        cache: str = "default",
        max_age: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__(alias, using=using, combine_statements=combine_statements)
        self.cache = cache
        self.max_age = seconds_of("max_age", max_age)

    def recall(self, operation: Operation) -> Record | None:
        if operation.extend_on_replay:
            return None
        try:
            cached = caches[self.cache].get(self._name(operation.key, operation.scope))
            return decode_record(cached) if cached else None
        except Exception:
            logger.warning("The cache %r of results cannot be read.", self.cache, exc_info=True)
            return None

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
        asked_at = time.monotonic()
        claim_or_record = super().acquire(operation)
        if (
            isinstance(claim_or_record, Record)
            and claim_or_record.status is Status.COMPLETED
            and not claim_or_record.expired
        ):
            # Its own transaction may have stored it, and may still roll back.
            self.on_commit(lambda: self._remember(claim_or_record, asked_at))
        return claim_or_record

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        completed = super().complete(claim, payload, last=last)
        if completed:
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
            self.on_commit(lambda: self._remember(record, claim.asked_at))
        return completed

    def check(self) -> Sequence[CheckMessage]:
        return [*super().check(), *self._check_cache()]

    def _check_cache(self) -> Iterator[CheckMessage]:
        if self.cache not in settings.CACHES:
            yield Error(
                f"The store {self.alias!r} uses the cache {self.cache!r}, which is not in CACHES.",
                hint=f"CACHES has: {', '.join(map(repr, settings.CACHES))}.",
                id="idempotency_django.E003",
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

    def _remember(self, record: Record, since: float) -> None:
        """Cache a committed response for the rest of its time to live at that moment."""
        # What was forgotten since that moment stays forgotten for max_age.
        elapsed, left = time.monotonic() - since, record.ttl_left
        left = None if left is None else left - elapsed
        age = self.max_age - elapsed
        lifetime = age if left is None else min(age, left - 1)  # as clocks do not run alike
        if lifetime < 1 or record.payload is None:
            return
        expires = None if left is None else time.time() + left
        named = (record.key, record.scope, record.attempt, record.fingerprint, record.record_id)
        entry = (*named, expires, *encode(record.payload))
        try:
            # Only where nothing is: what was forgotten meanwhile must stay so.
            caches[self.cache].add(self._name(record.key, record.scope), entry, int(lifetime))
        except Exception:
            logger.warning("A result could not be cached in %r.", self.cache, exc_info=True)

    def _name(self, key: str, scope: str) -> str:
        connection = connections[self.using]
        # One cache may serve several databases, and django-tenants' schemas of one.
        where = f"{connection.settings_dict['NAME']}:{getattr(connection, 'schema_name', '')}"
        parts = f"{len(where)}:{where}{len(key)}:{key}{scope}"
        return f"idempotency:{self.alias}:{hashlib.sha256(parts.encode()).hexdigest()}"
