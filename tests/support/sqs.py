"""A server of the protocol of Amazon SQS for the tests of consumers and publishers: moto.

It has a port of its own on 127.0.0.1, and is gone when the caller is (see
``tests.support.servers``). Tests ask for the fixture ``sqs_server``: one server for all of them, so
each makes queues with new names.

``TEST_SQS_URL`` (``sqs+http://host:port``) names a server to use instead.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.guard import Order
from tests.support.servers import Server, _guard, _start, _version, free_port

HOST = "127.0.0.1"


@contextmanager
def sqs(port: int = 0) -> Iterator[Server]:
    """A server of SQS; see :func:`client_options` for what clients ask for.

    Args:
        port: where it listens; 0: at any that is free.
    """
    if not port and (url := os.environ.get("TEST_SQS_URL")):
        yield Server(url, _version(url))
        return
    with _guard("sqs") as (folder, guard):
        port = port or free_port()
        serve = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
        order = Order([], serve, signal.SIGTERM, {})
        yield _start(folder, guard, order, f"sqs+http://{HOST}:{port}")


def client_options(server: Server) -> dict[str, Any]:
    """What ``boto3.client("sqs", …)`` needs to talk to the server."""
    return {
        "endpoint_url": server.url.removeprefix("sqs+"),
        "region_name": "eu-central-1",
        "aws_access_key_id": "tests",
        "aws_secret_access_key": "tests",
    }


def make_queue(server: Server, name: str, **attributes: str) -> str:
    """Make a queue, FIFO if its name ends so; its URL."""
    import boto3

    if name.endswith(".fifo"):
        attributes = {"FifoQueue": "true", **attributes}
    client = boto3.client("sqs", **client_options(server))
    return str(client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def kombu_url(server: Server) -> str:
    """The server, as kombu is told; its region is an option of the transport."""
    return server.url.replace("sqs+http://", "sqs://tests:tests@")
