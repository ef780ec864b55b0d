"""A real RabbitMQ for the tests of consumers and tasks, where it is installed.

It has its own node name, its own ``epmd``, a folder and ports of its own, and all of it is gone
when the caller is (see ``tests.support.servers``). Tests ask for the fixture
``rabbit``: one server for all of them, so each names its queues anew.

``TEST_RABBITMQ_URL`` (``amqp://user:password@host:port``) names a server to use instead. Its user
may make and delete queues.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.guard import Order
from tests.support.servers import Server, _account, _guard, _start, _version, free_port

HOST = "127.0.0.1"
LARGEST = 6 * 1024 * 1024
"""Bytes of the largest message that it takes."""
PROGRAMS = "/usr/lib/rabbitmq/bin"  # Debian's in the PATH is a wrapper that insists on its own user


@contextmanager
def rabbitmq() -> Iterator[Server | None]:
    """RabbitMQ, or ``None`` where it is not installed; the URL's user may do everything."""
    if url := os.environ.get("TEST_RABBITMQ_URL"):
        yield Server(url, _version(url))
        return
    path = os.pathsep.join([PROGRAMS, os.environ.get("PATH", os.defpath), "/usr/local/sbin"])
    program, names = (shutil.which(name, path=path) for name in ("rabbitmq-server", "epmd"))
    if program is None or names is None:
        yield None
        return
    with _name_server(names) as epmd, _guard("mq") as (folder, guard):
        port, password = free_port(), secrets.token_hex(16)
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = {HOST}:{port}\ndefault_user = test\ndefault_pass = {password}\n"
            f"max_message_size = {LARGEST}\n"
        )
        variables = _variables(folder) | {"ERL_EPMD_PORT": str(epmd)}
        serve = ["env", *(f"{name}={value}" for name, value in variables.items()), program]
        order = Order([], serve, signal.SIGTERM, _account())
        yield _start(folder, guard, order, f"amqp://test:{password}@{HOST}:{port}//")


@contextmanager
def _name_server(program: str) -> Iterator[int]:
    """The port of an ``epmd`` of our own: the one that Erlang starts by itself outlives it."""
    port = free_port()
    with _guard("ep") as (folder, guard):
        serve = [program, "-port", str(port), "-address", HOST]
        order = Order([], serve, signal.SIGTERM, _account())
        _start(folder, guard, order, f"epmd://{HOST}:{port}")
        yield port


def _variables(folder: Path) -> dict[str, str]:
    """The environment that keeps a server away from any other on this machine."""
    return {
        "HOME": str(folder),  # of the Erlang cookie
        "RABBITMQ_NODENAME": f"{folder.name}@localhost",
        "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq",
        "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        "RABBITMQ_MNESIA_BASE": f"{folder}/data",
        "RABBITMQ_LOG_BASE": f"{folder}/logs",
        "RABBITMQ_LOGS": "-",  # with the rest of the guard's log
        "RABBITMQ_PID_FILE": f"{folder}/pid",
        "RABBITMQ_DIST_PORT": str(free_port()),
        # One scheduler, which does not spin while it waits: tests share their processors.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none +sbwtdcpu none"
        ),
        "detached": "1",  # the script becomes the server, which then gets the guard's signal itself
    }
