"""The tables of messaging in the admin."""

from __future__ import annotations

from . import outbox

__all__ = ["outbox"]
