"""The store in Redis or Valkey."""

from __future__ import annotations

from ...lazy import extra

with extra("redis"):
    from .store import RedisStore

__all__ = ["RedisStore"]
