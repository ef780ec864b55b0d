"""SQS: its publisher and its transport."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoRegionError
from django.core.exceptions import ImproperlyConfigured

from ....conf import seconds_of
from ....policy import digest
from ..consumers import Consumer
from .base import BrokerUnavailable, GroupedBatch, Outgoing, Publisher, Refused
from .loop import ConsumerOptions, Incoming, Loop, Transport

MAX_BATCH: Final = 10
"""The most messages in one request to SQS."""

LARGEST: Final = 256 * 1024
"""The most bytes of all messages in one request to SQS (its oldest limit)."""

MOST_HEADERS: Final = 10
"""The most attributes of one message in SQS."""

_UNFIT: Final = frozenset(
    {
        "AWS.SimpleQueueService.BatchRequestTooLong",
        "InvalidMessageContents",
        "InvalidParameterValue",
    }
)
"""The error of SQS for a request with an invalid message, for example one that is too large."""

_NAME: Final = re.compile(r"(?!(AWS|Amazon)\.)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.IGNORECASE)

_ID: Final = re.compile(r"[A-Za-z0-9!-/:-@[-`{-~]{1,128}")


def _connected(arguments: Mapping[str, Any], connect: float, read: float) -> Any:
    """A client of SQS, for publisher and transport alike.

    Args:
        arguments: arguments of ``boto3.client("sqs", …)``.
        connect: seconds that SQS may take to accept the connection.
        read: seconds that it may take to answer.

    Raises:
        ImproperlyConfigured: no region is known.
    """
    config = Config(connect_timeout=connect, read_timeout=read)
    try:
        return boto3.client("sqs", **{"config": config, **arguments})
    except NoRegionError as error:
        raise ImproperlyConfigured(
            "SQS needs an AWS region. Set AWS_DEFAULT_REGION, or pass --option "
            'client.region_name=eu-central-1 (in code: client={"region_name": "eu-central-1"}).'
        ) from error


class SqsPublisher(Publisher):
    """Publishes to a queue of Amazon SQS, each message as a CloudEvent in the JSON format.

    In a FIFO queue, a group of the outbox is a group of SQS, and SQS itself drops what is sent a
    second time within five minutes. A message without a group is a group of its own there.

    Args:
        topic: the topic.
        url: the queue's URL; it ends in ``.fifo`` if it is a FIFO queue.
        timeout: how long SQS may take to accept the connection, and to answer.
        client: arguments for ``boto3.client``, such as ``{"region_name": "eu-central-1"}``.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str,
        timeout: timedelta = timedelta(seconds=10),
        client: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        self._url = url
        self._is_fifo = url.endswith(".fifo")
        self._timeout = seconds_of("timeout", timeout)
        self._arguments = client or {}
        self._client: Any = None

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        if self._client is None:
            self._client = _connected(self._arguments, self._timeout, self._timeout)
        batch = GroupedBatch(messages, self.deadline)
        while places := batch.ready:
            try:
                self._send(batch, self._request(batch, places))
            except (BotoCoreError, ClientError) as error:
                batch.give_up(error)
        return batch.answers

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _request(self, batch: GroupedBatch, places: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The entries of a request, by their places; no more than SQS takes."""
        entries: dict[int, dict[str, Any]] = {}
        size = 0
        for place in places:
            try:
                entry = self._entry(place, batch.messages[place])
            except ValueError as error:
                batch.answer(place, error)
                continue
            size += len(entry["MessageBody"])  # it is ASCII
            if entries and (len(entries) == MAX_BATCH or size > LARGEST):
                break
            entries[place] = entry
        return entries

    def _entry(self, place: int, message: Outgoing) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "Id": str(place),
            "MessageBody": message.event(self.source).to_json(),
            "MessageAttributes": _attributes(message.headers),
        }
        if self._is_fifo:
            entry["MessageDeduplicationId"] = _fit(message.message_id)
            entry["MessageGroupId"] = _fit(message.group or message.message_id)
        return entry

    def _send(self, batch: GroupedBatch, entries: dict[int, dict[str, Any]]) -> None:
        """Send a request, and note what SQS says of each of its entries."""
        if not entries:
            return
        try:
            answer = self._client.send_message_batch(
                QueueUrl=self._url, Entries=[*entries.values()]
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in _UNFIT:
                raise
            for place in filter(batch.is_ready, entries):  # one of them is not taken
                if len(entries) == 1:
                    batch.answer(place, error)
                else:
                    self._send(batch, {place: entries[place]})
            return
        for sent in answer.get("Successful", ()):
            batch.answer(int(sent["Id"]), None)
        for failed in answer.get("Failed", ()):
            kind = Refused if failed.get("SenderFault", True) else BrokerUnavailable
            batch.answer(int(failed["Id"]), kind(f"{failed['Code']}: {failed.get('Message')}"))


def _attributes(headers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Headers as the attributes of a message.

    Raises:
        ValueError: SQS takes none of these; it would refuse the whole request.
    """
    if len(headers) > MOST_HEADERS or not all(
        _NAME.fullmatch(name) and text.isprintable() for name, text in headers.items()
    ):
        raise ValueError(
            f"SQS does not accept the headers {dict(headers)}. Use at most {MOST_HEADERS} "
            "headers, with names of letters, digits and '_-.', and printable values."
        )
    return {
        name: {"DataType": "String", "StringValue": text} for name, text in headers.items() if text
    }


def _fit(text: str) -> str:
    """The text as an id of SQS, different for different texts."""
    return text if _ID.fullmatch(text) else digest(text)


logger = logging.getLogger("idempotency_django")

AT_MOST: Final = 10
"""The most messages that SQS returns to one call."""
_LONGEST: Final = 43_200  # seconds that SQS lets a message be invisible
_LONGEST_WAIT: Final = 20  # seconds that a call to SQS may wait for messages
_CONNECT: Final = 5  # seconds


def run_consumer(
    consumer: Consumer,
    url: str,
    *,
    visibility: timedelta = timedelta(seconds=60),
    wait: timedelta = timedelta(seconds=5),
    client: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Handle the messages of a queue until SIGTERM.

    A message is deleted after what it asked for is committed. While it is being handled, it is kept
    invisible to others.

    Args:
        consumer: the consumer.
        url: the queue's URL.
        visibility: when SQS delivers again what a process that died has received.
        wait: how long a call waits for messages, 1 to 20 seconds; SIGTERM waits for the call.
        client: arguments for ``boto3.client``, such as ``{"region_name": "eu-central-1"}``.
        options: see :class:`~idempotency_django.contrib.messaging.ConsumerOptions`.

    Raises:
        ImproperlyConfigured: an option cannot be used.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    common = ConsumerOptions(**options)
    if common.batch > AT_MOST:
        raise ImproperlyConfigured(f"batch is {common.batch}; SQS returns {AT_MOST} at most.")
    hidden = _whole("visibility", visibility, 3, _LONGEST)
    waits = _whole("wait", wait, 1, _LONGEST_WAIT)
    Loop(SQS(url, hidden, waits, client or {}), consumer, common).run()


def _whole(name: str, value: timedelta, least: int, longest: int) -> int:
    """The seconds of an option of SQS, which knows no parts of them."""
    seconds = seconds_of(name, value)
    if least <= seconds <= longest:
        return round(seconds)
    raise ImproperlyConfigured(f"{name} is {seconds:g} seconds; it must be {least} to {longest}.")


class SQS(Transport):
    """A queue.

    Args:
        url: the queue's URL.
        visibility: seconds that a received message is invisible to others.
        wait: seconds that a call waits for messages.
        client: arguments for ``boto3.client``.
    """

    name: ClassVar[str] = "SQS"
    lost: ClassVar[tuple[type[BaseException], ...]] = (BotoCoreError, ClientError)

    def __init__(self, url: str, visibility: int, wait: int, client: Mapping[str, Any]) -> None:
        self._url = url
        self._visibility = visibility
        self._wait = wait
        self._arguments = client
        self._client: Any = None
        self._renewed = 0.0

    def open(self) -> None:
        if self._client is None:
            self._client = _connected(self._arguments, _CONNECT, self._wait + 2 * _CONNECT)

    def fetch(self, limit: int) -> list[Incoming]:
        self._renewed = time.monotonic()
        answer = self._client.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=min(limit, AT_MOST),
            VisibilityTimeout=self._visibility,
            WaitTimeSeconds=self._wait,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return [self._incoming(message) for message in answer.get("Messages", ())]

    def beat(self, messages: Sequence[Incoming]) -> None:
        now = time.monotonic()
        if now - self._renewed >= self._visibility / 3:
            self._renewed = now
            self._set_visibility(messages, self._visibility)

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        self._each("delete_message_batch", messages)

    def postpone(self, message: Incoming, seconds: float) -> None:
        self._set_visibility([message], min(_LONGEST, max(1, round(seconds))))

    def validate_dead_letters(self) -> None:
        answer = self._client.get_queue_attributes(
            QueueUrl=self._url, AttributeNames=["RedrivePolicy"]
        )
        if "RedrivePolicy" not in answer.get("Attributes", {}):
            raise ImproperlyConfigured(
                f"The queue {self._url} has no redrive policy, so SQS would redeliver a failing "
                "message until it expires. Give the queue a redrive policy with a dead-letter "
                "queue, or add 'idempotency_django.contrib.messaging' to INSTALLED_APPS to store "
                "dead letters in the database."
            )

    def reject(self, message: Incoming, error: Exception) -> None:
        """Leave it to the queue's redrive policy, which counts how often it was received."""
        self._set_visibility([message], self._visibility)

    def release(self, messages: Sequence[Incoming]) -> None:
        self._set_visibility(messages, 0)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _incoming(self, message: dict[str, Any]) -> Incoming:
        received = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        attributes = message.get("MessageAttributes", {})
        return Incoming(
            place=f"{self._url}/{message['MessageId']}",
            body=message["Body"].encode(),
            headers=[(name, _value(attribute)) for name, attribute in attributes.items()],
            redelivered=received > 1,
            native=message,
        )

    def _set_visibility(self, messages: Sequence[Incoming], seconds: int) -> None:
        self._each("change_message_visibility_batch", messages, VisibilityTimeout=seconds)

    def _each(self, call: str, messages: Sequence[Incoming], **arguments: Any) -> None:
        """Make a call for a batch of messages. One that fails is delivered again."""
        if not messages:
            return
        entries: Iterable[dict[str, Any]] = [
            {"Id": str(at), "ReceiptHandle": message.native["ReceiptHandle"], **arguments}
            for at, message in enumerate(messages)
        ]
        answer = getattr(self._client, call)(QueueUrl=self._url, Entries=entries)
        for failed in answer.get("Failed", ()):
            message = messages[int(failed["Id"])]
            logger.warning(
                "SQS has refused a change to the message at %s: %s",
                message.place,
                failed.get("Message") or failed["Code"],
            )


def _value(attribute: dict[str, Any]) -> Any:
    return attribute.get("StringValue", attribute.get("BinaryValue"))
