"""Commits with a view's effects what it writes to the session, and forgets it with them.

Django saves the session after the view, when the effects are already committed. If a worker died in
between, the effects would be there without the session. And what a rolled-back attempt wrote to the
session would stay. So would its messages, which Django keeps for the next page.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import Any

from django.contrib.sessions.backends import cached_db, db
from django.contrib.sessions.backends.base import SessionBase, UpdateError
from django.db import connections, router, transaction
from django.http import HttpRequest

_CONTENT = "_session_cache"
_KEY = "_SessionBase__session_key"
_STATE = (_CONTENT, _KEY, "accessed", "modified")
"""The attributes of Django's sessions with unsaved data."""


def save_session(request: HttpRequest, using: str | None) -> None:
    """Save the session in the running transaction, if the session is stored in that database.

    Django's middleware saves it again, and sets the cookie.
    """
    session = _session_in(request, using)
    if session is None or not session.modified or session.is_empty():
        return
    with suppress(UpdateError):  # it was deleted meanwhile, which the middleware says
        db.SessionStore.save(session)
        if isinstance(session, cached_db.SessionStore):
            # Else it would be read from there, even after a rollback.
            _forget_cached(session, None)


def _session_in(request: HttpRequest, using: str | None) -> db.SessionStore | None:
    """The session, where it lives in the database of the running transaction, which is sound."""
    session = getattr(request, "session", None)
    if not isinstance(session, db.SessionStore):
        return None
    alias = router.db_for_write(session.model)
    connection = connections[alias]
    sound = connection.in_atomic_block and not connection.needs_rollback
    return session if alias == using and sound else None


def _forget_cached(session: cached_db.SessionStore, former: str | None) -> None:
    """Drop from the cache what it holds of a changed session, and of the one it was before."""
    if session.modified:
        cache: Any = vars(session)["_cache"]
        for key in {session.session_key, former} - {None}:
            cache.delete(f"{session.cache_key_prefix}{key}")


class SessionSnapshot:
    """The session and the messages of a request, as they are before its view runs.

    Attributes:
        is_cached: whether other requests may read the session from a cache.
    """

    def __init__(self, request: HttpRequest) -> None:
        session = getattr(request, "session", None)
        self._session = session if isinstance(session, SessionBase) else None
        self._state: dict[str, Any] = {}
        self.is_cached = isinstance(session, cached_db.SessionStore)
        known = vars(self._session) if self._session is not None else {}
        for name in _STATE:
            if name in known:
                self._state[name] = known[name]
        # What is not to be saved is read again instead: a session may be large.
        content = self._state.pop(_CONTENT, None)
        if content is not None and self._state.get("modified"):
            self._state[_CONTENT] = copy.deepcopy(content)
        self._messages = getattr(request, "_messages", None)
        if self._messages is not None:
            self._queued = len(getattr(self._messages, "_queued_messages", ()))
            self._added = getattr(self._messages, "added_new", False)

    def forget_cached_at_commit(self, request: HttpRequest, using: str | None) -> None:
        """Drop a changed session from the cache when the running transaction has committed.

        Until then other requests read from the database what the session was, and cache it.
        """
        session = _session_in(request, using)
        if isinstance(session, cached_db.SessionStore):
            forget = partial(_forget_cached, session, self._state.get(_KEY))
            transaction.on_commit(forget, using=using, robust=True)

    def restore(self) -> None:
        """Forget what was written to the session since, and the messages."""
        if self._session is not None:
            for name in _STATE:
                vars(self._session).pop(name, None)
            vars(self._session).update(self._state)
        if self._messages is not None and hasattr(self._messages, "_queued_messages"):
            del self._messages._queued_messages[self._queued :]
            self._messages.added_new = self._added
