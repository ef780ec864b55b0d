"""The differences between databases on the hot path, one module each, by Django's ``vendor``."""

from __future__ import annotations

from .base import Dialect, plain
from .mysql import MySQL
from .pipelining import Pipeline
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = [
    "DIALECTS",
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
