"""What a view writes to the session: committed with its effects, forgotten with them.

Django saves the session after the view, when the effects are already committed. If a worker died in
between, the effects would be there without the session. And what a rolled-back attempt wrote to the
session would stay.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from django.contrib.sessions.backends import cached_db, db
from django.contrib.sessions.backends.base import SessionBase, UpdateError
from django.db import connections, router
from django.http import HttpRequest

_STATE = ("_session_cache", "_SessionBase__session_key", "accessed", "modified")
"""What Django's sessions know until they are saved."""


def save_session(request: HttpRequest, using: str | None) -> None:
    """Save the session in the running transaction, if the session is stored in that database.

    Django's middleware saves it again, and sets the cookie.
    """
    session = getattr(request, "session", None)
    if not isinstance(session, db.SessionStore) or not session.modified:
        return
    alias = router.db_for_write(session.model)
    if alias != using or not connections[alias].in_atomic_block or session.is_empty():
        return
    with suppress(UpdateError):  # it was deleted meanwhile, which the middleware says
        db.SessionStore.save(session)
        if isinstance(session, cached_db.SessionStore):
            # Else it would be read from there, whatever becomes of the transaction.
            cache: Any = vars(session)["_cache"]
            cache.delete(session.cache_key)


class SessionBefore:
    """The state of a request's session now."""

    def __init__(self, request: HttpRequest) -> None:
        session = getattr(request, "session", None)
        self._session = session if isinstance(session, SessionBase) else None
        known = vars(self._session) if self._session is not None else {}
        self._state = copy.deepcopy({name: known[name] for name in _STATE if name in known})

    def restore(self) -> None:
        """Forget what was written to the session since."""
        if self._session is not None:
            for name in _STATE:
                vars(self._session).pop(name, None)
            vars(self._session).update(self._state)
