"""Sessions in this process: a login in a test writes no rows.

They are in a cache that the tests' settings don't name, so that no test empties or replaces it.
What depends on rows of sessions sets Django's own engine.
"""

from __future__ import annotations

from typing import Any

from django.contrib.sessions.backends import cache
from django.core.cache.backends.locmem import LocMemCache

KEPT = LocMemCache("sessions", {"MAX_ENTRIES": 1_000_000})


class SessionStore(cache.SessionStore):
    """What ``SESSION_ENGINE`` names."""

    def __init__(self, session_key: str | None = None) -> None:
        super().__init__(session_key)
        self._cache: Any = KEPT
