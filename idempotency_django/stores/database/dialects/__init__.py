"""The differences between databases, one module each, by Django's ``vendor``."""

from __future__ import annotations

from .base import Dialect, described, plain
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["DIALECTS", "Dialect", "MySQL", "PostgreSQL", "SQLite", "described", "plain"]

DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}
