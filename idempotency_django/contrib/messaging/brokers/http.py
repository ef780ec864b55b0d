"""Outgoing webhooks, with httpx: the extra ``[webhooks]``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from ....backoff import retry_after
from ....conf import seconds_of
from ..events import write_time
from ..verifiers import StandardWebhooks
from .base import Batch, Outgoing, Publisher, Refused, unavailable

SHORTEST: Final = 24
LONGEST: Final = 64
"""Bytes of a secret."""
CONCURRENCY: Final = 10
"""How many webhooks of a topic are under way at a time."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of webhooks.

    Attributes:
        url: where it is sent to.
        secrets: what it is signed with, such as ``["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]``. It
            has one signature by each: while a secret is replaced, the new one and the old one.
        headers: further headers, for example of the receiver's own authentication.

    Raises:
        ValueError: a secret or the URL cannot be used.
    """

    url: str
    secrets: Sequence[str] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.url, str) and urlsplit(self.url).hostname):
            raise ValueError(f"the URL {self.url!r} has no host. Write 'https://host/path'")
        if isinstance(self.secrets, str) or not self.secrets:
            raise ValueError(
                "it has no secrets, so the receiver could not verify the webhooks. Pass a list "
                "with at least one secret"
            )
        for place, secret in enumerate(self.secrets, 1):
            if not _is_strong(secret):  # the error does not show it
                raise ValueError(
                    f"its secret number {place} is not a secret of Standard Webhooks: 'whsec_', "
                    f"followed by {SHORTEST} to {LONGEST} random bytes in Base64. Create one with "
                    "python -c \"import base64, secrets; print('whsec_' + "
                    'base64.b64encode(secrets.token_bytes(32)).decode())"'
                )


def _is_strong(secret: str) -> bool:
    try:
        return SHORTEST <= len(StandardWebhooks([]).key_of(secret)) <= LONGEST
    except ValueError:
        return False


LONGEST_DELAY: Final = 3600
"""The longest ``Retry-After`` of a receiver that is honoured, in seconds."""

_CONNECTION: Final = {
    *("connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
}
"""Headers of one connection. Those of a message would contradict them."""

_SHOWN: Final = 200  # characters of a response that are noted


class HttpPublisher(Publisher):
    """Sends each message as a webhook, signed as Standard Webhooks says.

    The body is the message as a CloudEvent in JSON, which is signed as a whole. ``webhook-id`` is
    the message's id on every attempt. A response with a status from 200 to 299 confirms it, and 410
    (Gone) says that no attempt ever will. Redirects are not followed.

    Args:
        topic: the topic.
        url: where all messages are sent to.
        secrets: what they are signed with; see :class:`Endpoint`.
        endpoint: instead of both, the path of a function that gets an :class:`~.base.Outgoing` and
            returns its ``Endpoint``, or ``None`` if the message has no receiver.
        timeout: for an attempt, from the connection to the response.
        allow_http: whether a URL may begin with ``http://``; for tests.
        client: further arguments of ``httpx.AsyncClient``, such as ``verify`` and ``proxy``.

    Raises:
        ValueError: there is not exactly one way to find the endpoint, or it cannot be used.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str = "",
        secrets: Sequence[str] = (),
        endpoint: str = "",
        timeout: timedelta = timedelta(seconds=10),
        allow_http: bool = False,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        if bool(url) == bool(endpoint):
            raise ValueError(
                "it needs either url and secrets, or endpoint (the path of a function)"
            )
        self._timeout = seconds_of("timeout", timeout)
        self._schemes = ("https", "http") if allow_http else ("https",)
        self._options: dict[str, Any] = {"trust_env": False, **(client or {})}
        fixed = self._allowed(Endpoint(url, secrets)) if url else None
        self._endpoint_of: Callable[[Outgoing], Endpoint | None] = lambda _: fixed
        if endpoint:
            try:
                self._endpoint_of = import_string(endpoint)
            except ImportError as error:
                raise ImproperlyConfigured(
                    f"its endpoint {endpoint!r} cannot be imported: {error}. Pass the path of a "
                    "function, such as 'shop.webhooks.endpoint_of'"
                ) from error

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        # Here, and not in the event loop: it may ask the database.
        endpoints = [self._found(message) for message in messages]
        batch = Batch(messages, self.deadline)
        asyncio.run(self._publish(batch, endpoints))
        return batch.results

    async def _publish(
        self, batch: Batch, endpoints: Sequence[Endpoint | Exception | None]
    ) -> None:
        free = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(timeout=self._timeout, **self._options) as client:

            async def follow(group: str | int) -> None:
                while True:
                    async with free:
                        if (place := batch.next(group)) is None:
                            return
                        error = await self._post(client, batch.messages[place], endpoints[place])
                    batch.note(group, error)

            await asyncio.gather(*map(follow, batch.groups))

    async def _post(
        self,
        client: httpx.AsyncClient,
        message: Outgoing,
        endpoint: Endpoint | Exception | None,
    ) -> Exception | None:
        if endpoint is None or isinstance(endpoint, Exception):
            return endpoint
        try:
            async with asyncio.timeout(self._timeout):
                request = client.build_request(
                    "POST", endpoint.url, **self._parts(message, endpoint)
                )
                response = await client.send(request, stream=True, follow_redirects=False)
                try:
                    return await _judged(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            return TimeoutError(f"{endpoint.url} did not respond within {self._timeout:g} seconds.")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this message's
            return error

    def _parts(self, message: Outgoing, endpoint: Endpoint) -> dict[str, Any]:
        """The headers and the body of a webhook."""
        event = message.event(self.source)
        # For receivers that expect the usual members: type, timestamp, data.
        extensions = {**event.extensions, "timestamp": write_time(message.created_at)}
        body = dataclasses.replace(event, extensions=extensions).to_json().encode()
        given = {**message.headers, **endpoint.headers}
        headers = httpx.Headers({k: v for k, v in given.items() if k.lower() not in _CONNECTION})
        headers.update({"content-type": "application/json"})
        verifier = StandardWebhooks(endpoint.secrets)
        headers.update(verifier.sign(body, message_id=message.message_id))
        return {"headers": headers, "content": body}

    def _found(self, message: Outgoing) -> Endpoint | Exception | None:
        try:
            endpoint = self._endpoint_of(message)
            return None if endpoint is None else self._allowed(endpoint)
        except (InterfaceError, OperationalError, ImportError) as error:
            return unavailable(error)
        except Exception as error:  # noqa: BLE001  # any error is the message's
            return error

    def _allowed(self, endpoint: Endpoint) -> Endpoint:
        if urlsplit(endpoint.url).scheme.lower() not in self._schemes:
            raise ValueError(
                f"the URL {endpoint.url!r} does not begin with https://, so others could read the "
                "webhooks in transit. Use https, or pass allow_http=True in a test"
            )
        return endpoint


async def _judged(response: httpx.Response) -> Exception | None:
    """The result of a message, by the response to it."""
    status = response.status_code
    if response.is_success:
        return None
    text = await _beginning(response)
    what = f"{response.request.url} responded with {status} {response.reason_phrase}{text}"
    if status == httpx.codes.GONE:
        return Refused(
            f"{what}. The receiver rejects all webhooks: disable the endpoint.", final=True
        )
    if response.has_redirect_location:
        return Refused(f"{what}. Redirects are not followed: correct the endpoint's URL.")
    delay = retry_after(response.headers.get("retry-after", ""))
    return Refused(what, delay=min(delay, timedelta(seconds=LONGEST_DELAY)))


async def _beginning(response: httpx.Response) -> str:
    """The beginning of the receiver's response, for the operator."""
    read = b""
    async for chunk in response.aiter_raw():
        read += chunk
        if len(read) >= _SHOWN:
            break
    text = " ".join(read[:_SHOWN].decode(errors="replace").split())
    return f": {text}" if text and text.isprintable() else ""
