"""The command that the page on consumers shows, before a real server of Kafka's protocol."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from typing import Any

import confluent_kafka
import pytest
from shop.models import Charge

from idempotency_django.contrib.messaging import claim_stream
from idempotency_django.testing import PATIENCE
from tests.docs.examples import ROOT
from tests.support.kafka import bootstrap, make_topic
from tests.support.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True)]

PAGE = ROOT / "docs" / "messages" / "consumers.md"

QUICK = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "200", "fetch.wait.max.ms": "50"}
"""So that the group has its partitions soon."""


class Done(Exception):
    """Everything was delivered that there is."""


def run(server: Server, topic: str, last: bytes) -> None:
    """Run the page's command until this value was delivered; each time in a new group."""
    [block] = re.findall(
        r"^```python\n(# shop/management/commands/.*?)^```",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    deadline = time.monotonic() + PATIENCE
    consumers = []

    class Consumer(confluent_kafka.Consumer):
        def __init__(self, settings: dict[str, str]) -> None:
            known = {"bootstrap.servers": bootstrap(server), "group.id": uuid.uuid4().hex}
            super().__init__(settings | known | QUICK)
            consumers.append(self)
            self.last: Any = None

        def subscribe(self, topics: list[str], **callbacks: Any) -> None:
            super().subscribe([topic], **callbacks)

        def poll(self, timeout: float) -> Any:
            if self.last is not None and self.last.value() == last:
                raise Done
            assert time.monotonic() < deadline
            self.last = super().poll(timeout)
            return self.last

    source = block.replace("import OFFSET_BEGINNING, Consumer", "import OFFSET_BEGINNING")
    assert source != block
    names: dict[str, Any] = {"__name__": "consume_orders", "Consumer": Consumer}
    exec(source, names)
    try:
        with pytest.raises(Done):
            names["Command"]().handle()
    finally:
        for consumer in consumers:
            consumer.close()


def test_page(kafka: Server) -> None:
    """Whatever Kafka believes to be read, each message has one effect."""
    topic = f"orders-{uuid.uuid4().hex}"
    make_topic(kafka, topic)
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap(kafka)})

    def produce(*numbers: int) -> None:
        for number in numbers:
            producer.produce(topic, f"order-{number}".encode())
        assert producer.flush(PATIENCE) == 0

    produce(*range(5))
    run(kafka, topic, b"order-4")
    produce(*range(5, 8))
    run(kafka, topic, b"order-7")
    found = Counter(Charge.objects.values_list("reference", flat=True))
    assert found == {f"order-{number}": 1 for number in range(8)}
    assert claim_stream(f"billing/{topic}/0").position == 7
