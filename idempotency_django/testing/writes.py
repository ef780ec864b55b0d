"""For tests: what a request writes, sends and starts, apart from this package's own bookkeeping."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core import mail
from django.core.cache import caches
from django.core.cache.backends.db import BaseDatabaseCache
from django.core.cache.backends.locmem import LocMemCache
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

_TABLE: Final = r"(?:[\"`\w$]+\.)?[\"`]?([\w$]+)"
_WRITE: Final = re.compile(
    r"(?:INSERT(?:\s+OR\s+\w+|\s+IGNORE)?\s+INTO|REPLACE\s+INTO|MERGE\s+INTO|DELETE\s+FROM"
    r"|UPDATE(?:\s+OR\s+\w+)?)"
    rf"\s+(?:ONLY\s+)?{_TABLE}",
    re.IGNORECASE,
)
_SAVEPOINT: Final = re.compile(r"(ROLLBACK TO )?SAVEPOINT (\S+)")
_LAST_LOGIN: Final = re.compile(r"UPDATE \S+ SET [\"`]?last_login[\"`]? = [^,]+ WHERE ")
_OURS: Final = "idempotency_django"
_TASK_SIGNALS: Final = (
    ("celery.signals", "task_prerun"),  # the only one that eager tasks send
    ("celery.signals", "before_task_publish"),
    ("django_tasks.signals", "task_enqueued"),
    ("django.tasks.signals", "task_enqueued"),
)


def table_written(sql: str) -> str | None:
    """The table that a statement writes to; ``None``: it does not write."""
    found = _WRITE.match(sql.lstrip())
    return found[1] if found else None


def bookkeeping_tables() -> frozenset[str]:
    """Tables that a retry may write to: records, sessions, caches with throttles."""
    stores: list[Any] = [each for each in caches.all(True) if isinstance(each, BaseDatabaseCache)]
    tables = {each._table for each in stores}
    if apps.is_installed(_OURS):
        tables |= {model._meta.db_table for model in apps.get_app_config(_OURS).get_models()}
    if apps.is_installed("django.contrib.sessions"):
        session = import_module(settings.SESSION_ENGINE).SessionStore
        if hasattr(session, "get_model_class"):
            tables.add(session.get_model_class()._meta.db_table)
    return frozenset(tables)


class _Log:
    """Notes what is written over a connection in a transaction, but for what is rolled back."""

    def __init__(self, connection: BaseDatabaseWrapper, ignored: Collection[str]) -> None:
        self.writes: list[str] = []
        self._vendor = connection.vendor
        self._ignored = ignored
        self._savepoints: dict[str, int] = {}

    def around(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute a statement, and note it."""
        result = execute(sql, params, many, context)
        text = str(sql).lstrip()
        point, table = _SAVEPOINT.match(text), table_written(text)
        if point and point[1]:
            del self.writes[self._savepoints.get(point[2], 0) :]
        elif point:
            self._savepoints[point[2]] = len(self.writes)
        elif table and table not in self._ignored and not _LAST_LOGIN.match(text):
            # SQLite counts the rows of a RETURNING when they are fetched.
            is_counted = self._vendor != "sqlite" or "RETURNING" not in text
            if not (is_counted and context["cursor"].rowcount == 0):
                self.writes.append(text)
        return result


@contextmanager
def rehearsal(ignore: Collection[str] = ()) -> Iterator[list[str]]:
    """Note what this thread does in the block that a retry must not repeat, and undo it.

    Noted are the statements that write rows, and in words e-mails, ``on_commit`` hooks and tasks.
    Undone are rows, on connections that are open already, ``on_commit`` hooks, e-mails, entries of
    caches in memory, and the log of queries. Tasks are only noted. Nothing is logged.

    Args:
        ignore: tables that may be written to.
    """
    effects: list[str] = []
    opened = [each for each in connections.all() if each.connection is not None and _allows(each)]
    with ExitStack() as undo:
        undo.enter_context(_silence())
        for connection in connections.all():
            undo.enter_context(_unlogged(connection))
        undo.enter_context(_caches_restored())
        for connection in opened:
            undo.enter_context(_rolled_back(connection))
        hooks = {each.alias: len(each.run_on_commit) for each in opened}
        sent = len(outbox())
        ignored = bookkeeping_tables().union(ignore)
        logs = [_Log(each, ignored) for each in opened]
        with ExitStack() as noting:
            noting.enter_context(_noting_tasks(effects))
            for connection, log in zip(opened, logs, strict=True):
                noting.enter_context(connection.execute_wrapper(log.around))
            yield effects
        effects[:0] = [write for log in logs for write in log.writes]
        effects += [f"e-mail {message.subject!r}" for message in outbox()[sent:]]
        del outbox()[sent:]
        for each in opened:
            added = [hook[1] for hook in each.run_on_commit[hooks[each.alias] :]]
            effects += [f"on_commit hook {name}" for name in map(_named, added) if name]


def outbox() -> list[Any]:
    """The e-mails of the test so far."""
    found: list[Any] = getattr(mail, "outbox", [])
    return found


def _named(hook: Any) -> str:
    """The name of a hook; empty: it is this package's own."""
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", "") or ""
    if module.partition(".")[0] == _OURS:
        return ""
    return f"{module}.{getattr(hook, '__qualname__', hook)}"


@contextmanager
def _noting_tasks(names: list[str]) -> Iterator[None]:
    """Add the names of the Celery and Django tasks that the block sends."""

    def note(sender: Any = None, **_: Any) -> None:
        # A task that is idempotent itself may be sent twice.
        if not any(base.__module__.partition(".")[0] == _OURS for base in type(sender).__mro__):
            names.append(f"task {getattr(sender, 'name', sender)}")

    # A project that sends tasks has imported them.
    modules = [(sys.modules.get(module), name) for module, name in _TASK_SIGNALS]
    signals = [getattr(module, name) for module, name in modules if module]
    for signal in signals:
        signal.connect(note, weak=False)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(note)


def _allows(connection: BaseDatabaseWrapper) -> bool:
    """Whether the test may use a database, which another test before it has opened."""
    try:
        connection.cursor().close()
    except Exception:  # noqa: BLE001  # Django and pytest-django forbid it in different ways
        return False
    return True


@contextmanager
def _rolled_back(connection: BaseDatabaseWrapper) -> Iterator[None]:
    atomic = transaction.atomic(using=connection.alias)
    atomic._from_testcase = True  # type: ignore[attr-defined]  # durable blocks may be in it
    with atomic:
        try:
            yield
        finally:
            transaction.set_rollback(True, using=connection.alias)


@contextmanager
def _unlogged(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """``assertNumQueries`` does not count what is executed in the block."""
    before = list(connection.queries_log)
    try:
        yield
    finally:
        connection.queries_log.clear()
        connection.queries_log.extend(before)


@contextmanager
def _caches_restored() -> Iterator[None]:
    """Throttles count nothing of what happens in the block, where they count in memory."""
    stores: list[Any] = [each for each in caches.all(True) if isinstance(each, LocMemCache)]
    before = [(each._cache.copy(), each._expire_info.copy()) for each in stores]
    try:
        yield
    finally:
        for each, (entries, expiry) in zip(stores, before, strict=True):
            for current, kept in ((each._cache, entries), (each._expire_info, expiry)):
                current.clear()
                current.update(kept)


@contextmanager
def _silence() -> Iterator[None]:
    """``caplog`` sees no record of the block."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
