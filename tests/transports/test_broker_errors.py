"""What Kafka and SQS say only seldom: errors, refused commits, and entries that failed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from idempotency_django.contrib.messaging import BrokerUnavailable, Refused, SqsPublisher
from idempotency_django.contrib.messaging.brokers import kafka as kafka_module
from idempotency_django.contrib.messaging.brokers.kafka import Kafka
from idempotency_django.contrib.messaging.brokers.loop import Incoming
from idempotency_django.contrib.messaging.brokers.sqs import SQS
from tests.publishing.messages import outgoing

ERROR = KafkaError(KafkaError._TRANSPORT, "no broker")
FATAL = KafkaError(KafkaError._FATAL, "fenced", fatal=True)


class Message:
    """One of the partition 0 of the topic "orders"."""

    def __init__(self, offset: int = 0, error: KafkaError | None = None) -> None:
        self.offset = lambda: offset
        self.error = lambda: error
        self.topic, self.partition = (lambda: "orders"), (lambda: 0)
        self.value, self.headers, self.key = (lambda: b"{}"), (lambda: None), (lambda: None)


class Client:
    """A member of a group: gives the messages that it is told to, and notes what it is asked."""

    def __init__(self, config: Any, logger: Any) -> None:
        self.messages: list[Message] = []
        self.asked: list[str] = []
        self.refuse: KafkaError | None = None

    def subscribe(self, topics: Any, on_revoke: Callable[..., None], **_: Any) -> None:
        self.revoke = lambda: on_revoke(self, [TopicPartition("orders", 0)])

    def poll(self, timeout: float) -> Message | None:
        return self.messages.pop(0) if self.messages else None

    def consume(self, number: int, timeout: float) -> list[Message]:
        given, self.messages = self.messages[:number], self.messages[number:]
        return given

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("orders", 0)]

    def commit(self, **_: Any) -> None:
        self.asked.append("commit")
        if self.refuse is not None:
            raise KafkaException(self.refuse)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.asked.append(name)


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    """A transport that is open, with a client that does what it is told."""
    monkeypatch.setattr(kafka_module, "Client", Client)
    transport = Kafka(["orders"], {"bootstrap.servers": "nowhere:1"}, "dead", 1)
    transport.open()
    return transport


def given(kafka: Kafka, *messages: Message) -> list[Incoming]:
    """What is fetched when Kafka has these."""
    client_of(kafka).messages += messages
    return kafka.fetch(len(messages))


def client_of(kafka: Kafka) -> Any:
    return kafka._client


class TestKafka:
    def test_error_that_passes_is_logged(
        self, kafka: Kafka, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neighbours are delivered as ever."""
        fetched = given(kafka, Message(error=ERROR), Message(7))
        assert [message.place for message in fetched] == ["orders/0/7"]
        assert "Kafka reports a problem" in caplog.text

    def test_fatal_error_is_raised(self, kafka: Kafka) -> None:
        """The loop opens the transport again."""
        with pytest.raises(kafka.lost):
            given(kafka, Message(error=FATAL))

    def test_refused_commit_is_logged(self, kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
        """A later one says the same; if none comes, the messages come again."""
        fetched = given(kafka, Message())
        client_of(kafka).refuse = ERROR
        kafka.acknowledge(fetched)
        assert "Kafka has refused a commit of offsets" in caplog.text

    def test_fatal_refusal_of_a_commit_is_raised(self, kafka: Kafka) -> None:
        """So is that of a member which is none any more."""
        fetched = given(kafka, Message())
        client_of(kafka).refuse = FATAL
        with pytest.raises(kafka.lost):
            kafka.acknowledge(fetched)

    def test_revoked_partition_is_left_alone(self, kafka: Kafka) -> None:
        """Nothing is committed and nothing sought in a partition that another member has."""
        fetched = given(kafka, Message())
        client_of(kafka).revoke()
        kafka.acknowledge(fetched)
        kafka.postpone(fetched[0], 1)
        assert not {"commit", "seek"} & {*client_of(kafka).asked}

    def test_message_that_comes_with_a_beat_is_fetched_next(self, kafka: Kafka) -> None:
        """It is of a partition that was assigned while a handler ran; unless it is revoked."""
        client_of(kafka).messages = [Message(1)]
        kafka.beat([])
        assert [message.place for message in kafka.fetch(1)] == ["orders/0/1"]
        client_of(kafka).messages = [Message(2)]
        kafka.beat([])
        client_of(kafka).revoke()
        assert kafka.fetch(1) == []

    def test_closed_transport_has_nothing(self, kafka: Kafka) -> None:
        """Whoever forgets to open it is told so."""
        kafka.close()
        with pytest.raises(RuntimeError, match="not open"):
            kafka.fetch(1)

    @pytest.mark.parametrize("says", [[ERROR], []], ids=["refused", "no answer in time"])
    def test_dead_letter_that_is_not_confirmed(
        self, kafka: Kafka, says: list[KafkaError], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The message stays, and is delivered again."""

        class Producer:
            def __init__(self, config: Any, logger: Any) -> None: ...

            def produce(self, *_: Any, on_delivery: Callable[..., None], **__: Any) -> None:
                self.on_delivery = on_delivery

            def flush(self, timeout: float) -> None:
                for error in says:
                    self.on_delivery(error, None)

        monkeypatch.setattr(kafka_module, "Producer", Producer)
        [message] = given(kafka, Message())
        with pytest.raises(kafka.lost):
            kafka.reject(message, LookupError())
        assert "commit" not in client_of(kafka).asked


class Queue:
    """Says of each entry what it is told to, and notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, Any]]] = []
        self.failed: dict[str, dict[str, Any]] = {}
        self.unfit = 0

    def answer(self, QueueUrl: str, Entries: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
        self.sent.append(Entries)
        if self.unfit:
            self.unfit -= 1
            raise ClientError({"Error": {"Code": "InvalidMessageContents"}}, "SendMessageBatch")
        ids = [entry["Id"] for entry in Entries]
        return {
            "Successful": [{"Id": each} for each in ids if each not in self.failed],
            "Failed": [{"Id": each, **self.failed[each]} for each in ids if each in self.failed],
        }

    send_message_batch = change_message_visibility_batch = delete_message_batch = answer


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """What every client of SQS leads to."""
    made = Queue()
    monkeypatch.setattr(boto3, "client", lambda *_, **__: made)
    return made


class TestSQS:
    def test_entries_that_failed_are_told_apart(self, queue: Queue) -> None:
        """Whose fault it was decides whether the relay goes on to send the message."""
        publisher = SqsPublisher("orders", url="http://sqs/orders")
        queue.failed = {
            "0": {"Code": "Malformed", "SenderFault": True},
            "1": {"Code": "InternalError", "SenderFault": False, "Message": "later"},
        }
        refused, away, sent = publisher.publish([outgoing(name) for name in "abc"])
        assert isinstance(refused, Refused)
        assert isinstance(away, BrokerUnavailable)
        assert "later" in str(away)
        assert sent is None

    def test_unfit_request_is_sent_one_by_one(self, queue: Queue) -> None:
        """One message that SQS does not take keeps no neighbour back."""
        publisher = SqsPublisher("orders", url="http://sqs/orders")
        queue.unfit = 2  # the whole, and then the first alone
        answers = publisher.publish([outgoing(name) for name in "abc"])
        assert [answer is None for answer in answers] == [False, True, True]
        assert [len(entries) for entries in queue.sent] == [3, 1, 1, 1]

    def test_no_time_is_left(self, queue: Queue) -> None:
        """What could only be sent after the deadline is not."""
        publisher = SqsPublisher("orders", url="http://sqs/orders", timeout=timedelta(seconds=1))
        publisher.deadline = 0.0
        assert publisher.publish([outgoing("a")]) != [None]
        assert queue.sent == []

    def test_refused_change_is_logged(self, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
        """Such a message is delivered again; the others are acknowledged."""
        transport = SQS("http://sqs/orders", 30, 1, {})
        transport.open()
        messages = [
            Incoming(f"http://sqs/orders/{name}", b"", [], False, {"ReceiptHandle": name})
            for name in "ab"
        ]
        queue.failed = {"1": {"Code": "ReceiptHandleIsInvalid"}}
        transport.acknowledge(messages)
        assert "orders/b: ReceiptHandleIsInvalid" in caplog.text
        assert "orders/a" not in caplog.text

    def test_released_messages_are_there_at_once(self, queue: Queue) -> None:
        """What was fetched and not begun is for another process, without waiting."""
        transport = SQS("http://sqs/orders", 30, 1, {})
        transport.open()
        message = SimpleNamespace(place="p", native={"ReceiptHandle": "a"})
        transport.release([message])  # type: ignore[list-item]
        transport.release([])
        assert queue.sent == [[{"Id": "0", "ReceiptHandle": "a", "VisibilityTimeout": 0}]]
