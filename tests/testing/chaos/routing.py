"""Sends everything to one database."""

from __future__ import annotations


class To:
    """A router to that alias."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def db_for_read(self, model: object, **hints: object) -> str:
        """Where rows are read."""
        return self._alias

    def db_for_write(self, model: object, **hints: object) -> str:
        """Where rows are written."""
        return self._alias
