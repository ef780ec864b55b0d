"""What differs between databases on the hot path, one module each, by Django's ``vendor``."""

from __future__ import annotations

from .base import Batching, Dialect, plain
from .mysql import MySQL
from .pipelining import Pipeline
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = [
    "DIALECTS",
    "Batching",
    "Dialect",
    "MySQL",
    "Pipeline",
    "PostgreSQL",
    "SQLite",
    "plain",
]

DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}
