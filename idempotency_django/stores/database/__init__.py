"""The store in the project's own database."""

from __future__ import annotations

from .store import DatabaseStore

__all__ = ["DatabaseStore"]
