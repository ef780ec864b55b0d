"""The tables of messaging in the admin."""

from __future__ import annotations

from . import inbox, outbox, streams

__all__ = ["inbox", "outbox", "streams"]
