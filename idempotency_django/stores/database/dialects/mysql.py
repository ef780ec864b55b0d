"""MariaDB and MySQL."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import transaction

from ....models import UNIQUE_KEY
from ...records import Claim, Status
from ...rows import Row
from ..faults import Fault
from .base import PURGEABLE, Dialect

# From claims to their rows by the primary key: IN might read the whole table.
_OWNERS: Final = (
    "JSON_TABLE(%s, '$[*]' COLUMNS (id BIGINT PATH '$[0]', token VARCHAR(32) PATH '$[1]')) mine "
    "STRAIGHT_JOIN {table} row_of FORCE INDEX FOR JOIN (PRIMARY) ON row_of.id = mine.id"
)
_ARE_OWNERS: Final = "WHERE row_of.owner_token = mine.token AND row_of.status = 'in_progress'"
# Likewise. Where few rows are left, IN would wait for each locked row: two purges would deadlock.
_BATCH: Final = "JSON_TABLE(%s, '$[*]' COLUMNS (id BIGINT PATH '$')) batch STRAIGHT_JOIN"

PAUSES: Final = (0.005, 0.02, 0)
"""Seconds after an INSERT that a lock refused on MariaDB, until the next one. The lock may be
that of another key's duplicate: where an INSERT repeats a key, InnoDB locks the gap before its row
until that transaction ends.
"""


class MySQL(Dialect):
    """The lock is that of the row, which is there from the claim on.

    Looking comes first: an INSERT that fails would lock the gap, and with it other keys.
    """

    now = "UTC_TIMESTAMP(6)"
    shifted = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    left = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1e6"
    statements = {
        "read_current": f"{Dialect.shared['read']} FOR UPDATE SKIP LOCKED",
        # Of the next transaction. Above it, a purge would lock the gaps that new keys go into.
        "purge_level": "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "owned": f"SELECT row_of.id FROM {_OWNERS} {_ARE_OWNERS}",
        # No UPDATE skips what is locked.
        "lock_owned": f"SELECT row_of.id FROM {_OWNERS} {_ARE_OWNERS} FOR UPDATE SKIP LOCKED",
        "extend": f"UPDATE {_OWNERS} SET row_of.lease_expires_at = {{shifted}}",
        "choose_purgeable": (
            f"SELECT id FROM {{table}} WHERE {PURGEABLE} ORDER BY purge_at LIMIT %s "
            "FOR UPDATE SKIP LOCKED"
        ),
        "purge_steps": (
            f"DELETE target FROM {_BATCH} {{steps}} target FORCE INDEX FOR JOIN ({{steps_index}}) "
            "ON target.record_id = batch.id"
        ),
        "purge": (
            f"DELETE target FROM {_BATCH} {{table}} target FORCE INDEX FOR JOIN (PRIMARY) "
            "ON target.id = batch.id"
        ),
    }
    faults = {
        1020: Fault.BUSY,  # record has changed since last read
        1205: Fault.BUSY,  # lock wait timeout
        1213: Fault.BUSY,  # deadlock, which has rolled back everything
        1467: Fault.BUSY,  # lock wait timeout of the next number of a table, as InnoDB has it
        3572: Fault.BUSY,  # NOWAIT failed
        1054: Fault.MISSING,  # unknown column
        1146: Fault.MISSING,  # table does not exist
    }
    locked = frozenset({1205, 1467})  # by an INSERT that is not committed

    def claim(self, claim: Claim, connection: Any) -> Claim | Row | None:
        operation = claim.operation
        row = self.read(operation.key, operation.scope)
        if row is not None:
            return row
        lease = operation.lease or self.least_lease
        into, values, given = self.insertion(claim, Status.IN_PROGRESS, lease=lease)
        sql = f"{into} VALUES ({values})"
        with connection.cursor() as cursor:
            for pause in PAUSES if connection.mysql_is_mariadb else (0,):
                try:
                    cursor.execute(self._without_waiting(sql, connection), given)
                except DatabaseFault as error:
                    if self.is_taken(error):  # since we looked, or since this transaction did first
                        return self.row("read_current", operation.key, operation.scope)
                    if self.code(error.__cause__) not in self.locked:
                        raise
                    time.sleep(pause)
                else:
                    return replace(claim, record_id=int(cursor.lastrowid))
        return None

    @staticmethod
    def _without_waiting(sql: str, connection: Any) -> str:
        if connection.mysql_is_mariadb:
            return f"SET STATEMENT innodb_lock_wait_timeout=0 FOR {sql}"
        return sql.replace("INSERT", "INSERT /*+ SET_VAR(innodb_lock_wait_timeout = 1) */", 1)

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        with transaction.atomic(using=self.using):
            renewed = {row[0] for row in self.rows("lock_owned", *self.described(claims))}
            if renewed:
                free = [claim for claim in claims if claim.record_id in renewed]
                self.execute(self.sql["extend"], *self.described(free), seconds)
        return renewed

    def described(self, claims: Sequence[Claim]) -> Sequence[Any]:
        return [json.dumps([(claim.record_id, claim.token) for claim in claims])]

    def is_taken(self, error: BaseException) -> bool:
        return self.code(error.__cause__) == 1062 and UNIQUE_KEY in str(error)

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None
