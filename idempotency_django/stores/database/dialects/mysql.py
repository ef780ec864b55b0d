"""MariaDB and MySQL."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from django.db import Error as DatabaseFault

from ...records import Claim
from ...rows import Row
from ..faults import Fault
from .base import Dialect

# By the primary key. Where few rows are left, IN would read the whole table and wait for each row
# that is locked: two purges would deadlock.
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
        into, values, given = self.insertion(claim, lease=lease)
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

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None
