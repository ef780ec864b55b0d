"""Amazon SQS, with boto3: the extra ``[sqs]``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ....policy.canonical import digest
from .base import Away, Outgoing, Publisher, Refused
from .lines import Lines

AT_ONCE: Final = 10
"""Messages in one request: what SQS allows."""

LARGEST: Final = 256 * 1024
"""Bytes of all messages in one request: what SQS has always allowed."""

MOST_HEADERS: Final = 10
"""Attributes of one message: what SQS allows."""

_UNFIT: Final = frozenset(
    {
        "AWS.SimpleQueueService.BatchRequestTooLong",
        "InvalidMessageContents",
        "InvalidParameterValue",
    }
)
"""What SQS says to a request with a message that it does not take, such as one too large."""

_NAME: Final = re.compile(r"(?!(AWS|Amazon)\.)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.IGNORECASE)

_ID: Final = re.compile(r"[A-Za-z0-9!-/:-@[-`{-~]{1,128}")


class SqsPublisher(Publisher):
    """Publishes to a queue of Amazon SQS, each message as a CloudEvent in the JSON format.

    In a FIFO queue, a group of the outbox is a group of SQS, and SQS itself drops what is sent a
    second time within five minutes. A message without a group is a group of its own there.

    Args:
        topic: the topic.
        queue_url: the queue; its name ends in ``.fifo`` if it is a FIFO queue.
        timeout: seconds that SQS may take to accept the connection, and to answer.
        client: further arguments of ``boto3.client("sqs", …)``, such as ``region_name``.
    """

    def __init__(
        self,
        topic: str,
        *,
        queue_url: str,
        timeout: float = 10.0,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        self._queue_url = queue_url
        self._is_fifo = queue_url.endswith(".fifo")
        self._options = {
            "config": Config(connect_timeout=timeout, read_timeout=timeout),
            **(client or {}),
        }
        self._client: Any = None

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        lines = Lines(messages)
        if self._client is None:
            self._client = boto3.client("sqs", **self._options)
        while lines.heads:
            try:
                for request in list(self._requests(lines)):
                    self._send(lines, request)
            except (BotoCoreError, ClientError) as error:
                lines.give_up(error)
        return lines.answers

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _requests(self, lines: Lines) -> Iterator[dict[int, dict[str, Any]]]:
        """The first message of each line as entries of requests, none larger than SQS takes."""
        request: dict[int, dict[str, Any]] = {}
        size = 0
        for place in lines.heads:
            try:
                entry = self._entry(place, lines.messages[place])
            except ValueError as error:
                lines.fail(place, error)
                continue
            length = len(entry["MessageBody"])  # it is ASCII
            if request and (len(request) == AT_ONCE or size + length > LARGEST):
                yield request
                request, size = {}, 0
            request[place] = entry
            size += length
        if request:
            yield request

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

    def _send(self, lines: Lines, request: dict[int, dict[str, Any]]) -> None:
        """Send a request, and note what SQS says of each of its entries.

        Raises:
            Exception: SQS cannot be reached, or refuses the queue.
        """
        if late := self.late():
            for place in request:
                lines.fail(place, late)
            return
        try:
            answer = self._client.send_message_batch(
                QueueUrl=self._queue_url, Entries=list(request.values())
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in _UNFIT:
                raise
            for place, entry in request.items():
                if len(request) > 1:
                    self._send(lines, {place: entry})
                else:
                    lines.fail(place, error)
            return
        for sent in answer.get("Successful", ()):
            lines.confirm(int(sent["Id"]))
        for failed in answer.get("Failed", ()):
            kind = Refused if failed.get("SenderFault", True) else Away
            lines.fail(int(failed["Id"]), kind(f"{failed['Code']}: {failed.get('Message')}"))


def _attributes(headers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Headers as the attributes of a message.

    Raises:
        ValueError: SQS takes none of these; it would refuse the whole request.
    """
    if len(headers) > MOST_HEADERS or not all(
        _NAME.fullmatch(name) and text.isprintable() for name, text in headers.items()
    ):
        raise ValueError(
            f"SQS does not take the headers {dict(headers)}. Publish at most {MOST_HEADERS}, with "
            "names of letters, digits and '_-.', and with printable texts."
        )
    return {
        name: {"DataType": "String", "StringValue": text} for name, text in headers.items() if text
    }


def _fit(text: str) -> str:
    """The text as an id of SQS, different for different texts."""
    return text if _ID.fullmatch(text) else digest(text)
