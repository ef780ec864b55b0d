"""PostgreSQL, with a boundary before and after whatever goes to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.backends.postgresql import base

from tests.faults.boundaries import boundaries


class DatabaseWrapper(base.DatabaseWrapper):
    """Numbers the statements of every connection of the process, and where transactions end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute_wrappers.append(_executed)

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        with boundaries.around("CONNECT"):
            return super().get_new_connection(conn_params)

    def _set_autocommit(self, autocommit: bool) -> None:
        with boundaries.around("AUTOCOMMIT" if autocommit else "BEGIN"):
            super()._set_autocommit(autocommit)

    def _commit(self) -> None:
        with boundaries.around("COMMIT"):
            super()._commit()

    def _rollback(self) -> None:
        with boundaries.around("ROLLBACK"):
            super()._rollback()


def _executed(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    with boundaries.around(" ".join(str(sql).split())[:60]):
        return execute(sql, params, many, context)
