"""The tables of messaging in the admin."""

from __future__ import annotations

from . import inbox, outbox

__all__ = ["inbox", "outbox"]
