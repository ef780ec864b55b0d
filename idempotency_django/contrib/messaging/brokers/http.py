"""Outgoing webhooks, with httpx: the extra ``[webhooks]``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from asgiref.sync import async_to_sync, sync_to_async

from ....backoff import retry_after
from ....conf import seconds_of
from ....lazy import extra
from ..consumers import without_exits
from ..events import Event
from ..verifiers import StandardWebhooks
from .base import Batch, Publisher, Refused

with extra("webhooks"):
    import httpx

CONCURRENCY: Final = 10
"""How many webhooks of a topic are under way at a time."""
LONGEST_DELAY: Final = timedelta(hours=1)
"""The longest ``Retry-After`` of a receiver that is honoured."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of webhooks.

    Attributes:
        url: where it is sent to.
        secrets: what it is signed with, such as ``["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]``. It
            has one signature by each: while a secret is replaced, the new one and the old one.

    Raises:
        ValueError: the URL cannot be used.
        ImproperlyConfigured: nor can the secrets.
    """

    url: str
    secrets: Sequence[str] = field(repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if not parts.hostname or parts.port == 0:  # a larger port than there are raises, too
            raise ValueError(f"the URL {self.url!r} has no host. Write 'https://host/path'")
        StandardWebhooks(self.secrets).keys()


class HttpPublisher(Publisher):
    """Sends each message as a webhook, signed as Standard Webhooks says.

    The body is the message as a CloudEvent in JSON, which is signed as a whole. ``webhook-id`` is
    the message's id on every attempt. A response with a status from 200 to 299 confirms it.
    Redirects are not followed. For several receivers, write a subclass with an :meth:`endpoint_of`
    of its own. It needs neither ``url`` nor ``secrets``.

    Args:
        topic: the topic.
        url: where all messages are sent to.
        secrets: what they are signed with; see :class:`Endpoint`.
        timeout: for an attempt, from the connection to the response.
        client: further arguments of ``httpx.AsyncClient``, such as ``headers``, ``verify`` and
            ``proxy``.

    Raises:
        ValueError: the URL or a secret cannot be used.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str = "",
        secrets: Sequence[str] = (),
        timeout: timedelta = timedelta(seconds=10),
        client: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        self._timeout = seconds_of("timeout", timeout)
        self._options: dict[str, Any] = {"trust_env": False, **(client or {})}
        if url or type(self).endpoint_of is HttpPublisher.endpoint_of:
            self._endpoint = Endpoint(url, secrets)

    def endpoint_of(self, message: Event) -> Endpoint | None:
        """The receiver of a message; ``None``: it has none. An error is an attempt at it."""
        return self._endpoint

    def publish(self, batch: Batch) -> None:
        async_to_sync(self._publish)(batch)

    async def _publish(self, batch: Batch) -> None:
        endpoint_of = sync_to_async(self._found)  # in this relay's thread: it may ask the database
        async with httpx.AsyncClient(timeout=self._timeout, **self._options) as client:

            async def send() -> None:
                for message in batch:
                    found = await endpoint_of(message)
                    if isinstance(found, Endpoint):
                        found = await self._post(client, message, found)
                    batch.note(message, found)

            await asyncio.gather(*(send() for _ in range(CONCURRENCY)))

    async def _post(
        self, client: httpx.AsyncClient, message: Event, endpoint: Endpoint
    ) -> Exception | None:
        headers, content = _signed(message, endpoint)
        # Not read: a receiver could send a response without an end.
        request = client.stream(
            "POST", endpoint.url, headers=headers, content=content, follow_redirects=False
        )
        try:
            async with asyncio.timeout(self._timeout), request as response:
                return _judged(response)
        except TimeoutError:
            return TimeoutError(f"{endpoint.url} did not respond within {self._timeout:g} seconds.")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this message's
            return error

    def _found(self, message: Event) -> Endpoint | Exception | None:
        """The receiver of a message; an error of :meth:`endpoint_of` is the message's."""
        try:
            with without_exits():
                found = self.endpoint_of(message)
        except Exception as error:  # noqa: BLE001  # the others have receivers of their own
            return error
        if found is None or isinstance(found, Endpoint):
            return found
        return TypeError(f"endpoint_of() returned {found!r}, not an Endpoint or None.")


def _signed(message: Event, endpoint: Endpoint) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a webhook."""
    body = message.to_json().encode()
    signatures = StandardWebhooks(endpoint.secrets).sign(body, message_id=message.id)
    return {"content-type": "application/json", **signatures}, body


def _judged(response: httpx.Response) -> Exception | None:
    """The result of a message, by the response to it."""
    if response.is_success:
        return None
    what = f"{response.request.url} responded with {response.status_code} {response.reason_phrase}"
    delay = retry_after(response.headers.get("retry-after", ""))
    return Refused(what, delay=min(delay, LONGEST_DELAY))
