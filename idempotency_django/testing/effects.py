"""For tests: effects that no rollback undoes, noticed while a handler runs.

Python's audit events (PEP 578) tell of sockets, processes and files. A hook for them cannot be
removed, so it is installed only when something is watched for the first time.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

from ..engine import current_execution, current_step

logger = logging.getLogger("idempotency_django")

Kind = Literal["network", "process", "file"]

_DID: Final[dict[Kind, str]] = {
    "network": "talked to",
    "process": "started",
    "file": "wrote to",
}
"""What an effect of each kind did to its peer."""
_TRANSACTIONAL: Final = (
    "within its transaction{where}. No rollback undoes that, and a retry does it again. Do it "
    "after the commit, by after_commit() or transaction.on_commit(). Or give the policy "
    "mode='leased', and make it a step."
)
_LEASED: Final = (
    "outside of a step{where}. A retry after an interruption does it again. Make it a step: "
    "request.idempotency.step()."
)


@contextmanager
def effects_outside() -> Iterator[list[str]]:
    """Notice what handlers do in the block that no rollback undoes; for tests.

    ::

        with effects_outside() as effects:
            client.post("/charges/", headers={"Idempotency-Key": "6c1a"})
        assert not effects, effects[0]

    The list has a sentence for each connection, process and file that a handler used within its
    transaction, or outside of a step in the leased mode: what it is, where, and what to do about
    it. Databases, caches and brokers are left out, by the
    modules of their clients, and so are log files, Unix sockets, what ``tempfile`` opens, and
    compiled modules.

    It sees what Python does, in each thread that runs a handler. It does not see threads that a
    handler starts, processes that are forked, files that are removed or renamed, connections that
    libraries in C open (``psycopg``, ``confluent-kafka``, ``pycurl``), and mail that the test
    runner keeps in ``mail.outbox``.
    """
    _install()
    noticed: list[str] = []
    _watches.append(noticed)
    try:
        yield noticed
    finally:
        _watches.remove(noticed)


_watches: Final[list[list[str]]] = []
_here = threading.local()  # busy: the hook itself runs; looked_up: the last host name, and its port


@lru_cache(maxsize=1)
def _install() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    look = _EVENTS.get(event)
    if look is None or not _watches or getattr(_here, "busy", False):
        return
    _here.busy = True
    try:
        seen = look(*args)
        if seen is not None:
            _note(*seen)
    except Exception:  # an error of the hook would be one of the handler
        logger.exception("An effect (%s) could not be noted.", event)
    finally:
        _here.busy = False


# Python traces no audit hook otherwise: coverage and debuggers would not see it.
_audit.__cantrace__ = True  # type: ignore[attr-defined]


def _note(kind: Kind, peer: str) -> None:
    """Add an effect of a handler to all that want it."""
    execution = current_execution()
    if execution is None or current_step():
        return
    where = _place(sys._getframe())
    if where is None:
        return
    advice = (_LEASED if execution.operation.lease else _TRANSACTIONAL).format(where=where)
    effect = f"{execution.operation.name} {_DID[kind]} {peer} {advice}"
    for noticed in _watches:
        if effect not in noticed:
            noticed.append(effect)


# What the events tell.


def _network(_: object, address: Any) -> tuple[Kind, str] | None:
    if not (isinstance(address, tuple) and len(address) >= 2 and isinstance(address[0], str)):
        return None
    host, port = address[:2]
    looked_up = getattr(_here, "looked_up", None)
    name = looked_up[0] if looked_up and looked_up[1] == port else host
    return "network", _named(name, port)


def _named(host: str, port: Any) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _looked_up(host: Any, port: Any, *_: Any) -> None:
    _here.looked_up = (host, port) if isinstance(host, str) else None


def _sent(connection: Any, _: object) -> tuple[Kind, str] | None:
    """A message of ``http.client``, also over a connection that was open before."""
    return "network", _named(connection.host, connection.port)


def _process(*args: Any) -> tuple[Kind, str]:
    # subprocess.Popen(executable, args, …), os.posix_spawn(path, argv, env), os.system(command)
    command = args[0] if len(args) == 1 else args[1] or args[0]
    if isinstance(command, list | tuple):
        command = command[0]
    return "process", os.fsdecode(command).split()[0]


def _opened(path: Any, mode: str | None, flags: int) -> tuple[Kind, str] | None:
    writing = set(mode or "") & set("wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
    if not writing or isinstance(path, int):
        return None
    name = os.fsdecode(path)
    return None if name.startswith("/dev/") else ("file", name)


_EVENTS: Final[dict[str, Callable[..., tuple[Kind, str] | None]]] = {
    "socket.getaddrinfo": _looked_up,
    "socket.connect": _network,
    "socket.sendto": _network,
    "socket.sendmsg": _network,
    "http.client.send": _sent,
    "subprocess.Popen": _process,
    "os.system": _process,
    "os.posix_spawn": _process,
    "open": _opened,
}

# What is no effect.

_INNOCENT: Final = (
    "_pytest",
    "amqp",
    "coverage",
    "ctypes.util",
    "django.contrib.sessions",
    "django.core.cache",
    "django.core.files.uploadhandler",
    "django.db.backends",
    "idempotency_django.contrib.redis",
    "idempotency_django.stores",
    "importlib",
    "kombu",
    "logging",
    "platform",
    "pymemcache",
    "redis",
    "tempfile",
    "uuid",
    "valkey",
)
"""Modules whose connections, processes and files are no effects of the handler that calls them.

The database's, a session's, a cache's and a broker's are here; so are log files, temporary and
compiled ones.
"""
_FROZEN: Final = "<frozen importlib"
_AROUND_HANDLERS: Final = "idempotency_django.engine.running"
_OF_ASYNC_CODE: Final = ("asgiref.sync", "thread_handler")
"""Calls what async code awaits. Further out is not that code, but a test that waits for it."""
_COMMIT_HOOKS: Final = "run_and_clear_commit_hooks"
_HERE: Final = str(Path(__file__).parents[1]) + os.sep
_INSTALLED: Final = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _place(frame: FrameType | None) -> str | None:
    """The innermost line of the project; ``None``: what happens is no effect of the handler.

    Args:
        frame: where it happens.
    """
    is_hook = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        # The database's frames around a hook only call what the handler gave them.
        is_hook = is_hook or code.co_name == _COMMIT_HOOKS
        frozen = code.co_filename.startswith(_FROZEN)  # the import system
        if not is_hook and (frozen or _is_innocent(module)):
            return None
        if _is_project(code.co_filename):
            return f" at {os.path.relpath(code.co_filename)}:{frame.f_lineno}"
        if module == _AROUND_HANDLERS or (module, code.co_name) == _OF_ASYNC_CODE:
            break
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _is_innocent(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in _INNOCENT)


@lru_cache(maxsize=4096)
def _is_project(file: str) -> bool:
    return not file.startswith(("<", _HERE, *_INSTALLED))
