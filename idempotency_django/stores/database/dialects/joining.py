"""Several statements in one message of psycopg 3, as wrappers around what a cursor executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

LOST: Final = "idempotency_django: the claim has another owner"
"""What the server says when it did not commit, because a statement found no row of its owner's."""

_NO_PIPELINE = 0  # of its PGpipelineStatus

_OR_LOST: Final = (
    "WITH written AS (\n{statement}\n) "
    f"SELECT CAST(CASE count(*) WHEN 0 THEN '{LOST}' ELSE '1' END AS integer) FROM written"
)


def can_combine(connection: Any) -> bool:
    """Whether the driver sends a string as it is, and its BEGIN would say no more than ours."""
    cursors = getattr(connection.Database, "ClientCursor", None)  # psycopg2 has none
    driver = connection.connection
    return (
        cursors is not None
        and hasattr(driver, "_autocommit")  # see below
        and isinstance(driver.cursor_factory, type)
        and issubclass(driver.cursor_factory, cursors)
        and driver.isolation_level is driver.read_only is driver.deferrable is None
        and driver.pgconn.pipeline_status == _NO_PIPELINE
    )


def with_begin(
    execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    """Send BEGIN before the statement, in one message."""
    driver = context["connection"].connection
    driver.autocommit = True  # else psycopg would send a BEGIN of its own before
    try:
        result = execute(f"BEGIN; {sql}", params, many, context)
    finally:
        # As Django has set it, and asks for it: where it is on, iterator() declares its cursors
        # WITH HOLD, which cannot lock rows. The property cannot be set within a transaction.
        driver._autocommit = False
    context["cursor"].nextset()
    return result


def with_commit(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
    """Send COMMIT after the statement, in one message."""
    return execute(f"{sql}\n; COMMIT", *arguments)


def or_lost(statement: str) -> str:
    """A statement that does the same; if it finds no row, the server says ``LOST``.

    The server stops at an error, so that a COMMIT after it is not executed for a late owner.
    """
    return _OR_LOST.format(statement=statement)
