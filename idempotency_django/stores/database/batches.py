"""Several operations at once, on a database whose dialect can claim them in one statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...records import Claim, Operation, Record, new_token
from .dialects import Batching, Dialect
from .rows import in_progress, record_of

Name = tuple[str, str]
"""A key and its scope."""


def acquire_many(
    dialect: Batching,
    operations: Sequence[Operation],
    asked_at: float,
    resolved: Callable[[Operation, Record], Claim | Record],
) -> list[Claim | Record]:
    """Claim the operations, or return their records: one statement, and one look at what is left.

    Args:
        dialect: of the database.
        operations: what is wanted.
        asked_at: a value of ``time.monotonic()`` from now.
        resolved: takes over the key of a record if it is free.
    """
    wanted: dict[Name, Operation] = {}
    for operation in operations:
        wanted.setdefault(_name(operation), operation)
    # In one order everywhere, so that two batches do not wait for each other.
    tokens = {name: new_token() for name in sorted(wanted)}
    ids = dialect.claim_many([(wanted[name], token) for name, token in tokens.items()])
    rest = [name for name, token in tokens.items() if token not in ids]
    rows = dialect.read_many(rest) if rest else {}
    by_name: dict[Name, Claim | Record] = {}
    for name, token in tokens.items():
        operation = wanted[name]
        if token in ids:
            by_name[name] = Claim(operation, 1, token, ids[token], asked_at)
        elif name in rows:
            by_name[name] = resolved(operation, record_of(*name, rows[name]))
        else:  # an insert that is not committed yet holds the key
            by_name[name] = in_progress(operation)
    results: list[Claim | Record] = []
    for operation in operations:
        result = by_name[_name(operation)]
        results.append(result)
        if isinstance(result, Claim):  # which the first one gets; for others, it is in progress
            by_name[_name(operation)] = in_progress(operation)
    return results


def get_many(dialect: Dialect, names: Sequence[Name]) -> list[Record | None]:
    """The records of these keys and scopes, in their order: one statement, where there is one."""
    if isinstance(dialect, Batching):
        rows = dialect.read_many(names)
    else:
        rows = {name: dialect.read(*name) for name in names}
    return [record_of(*name, row) if (row := rows.get(name)) else None for name in names]


def _name(operation: Operation) -> Name:
    return operation.key, operation.scope
