"""Clients of httpx: the extra ``[client]``.

They are no transports: a transport does not notice that the connection is lost while the response
is read.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..lazy import extra
from .retrying import SAFE_METHODS, Call, OutcomeUnknown, Retries, new_key, refuse_body

with extra("client"):
    import anyio
    import httpx

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

_KEY: Final = "idempotency_key"
_NOT_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
)
_ERRORS: Final = 400


class _Keyed(Base):  # type: ignore[misc]  # a client of httpx
    """What both clients share: the key of a request, and the flow of its attempts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.retries = Retries.taken_from(options)
        super().__init__(*args, **options)

    def _keyed(self, request: httpx.Request) -> httpx.Request | None:
        """A copy of the request with a key; ``None``: it is sent as it is."""
        key = request.extensions.get(_KEY, "")
        if request.method in SAFE_METHODS or key is None:
            return None
        method, url, header = request.method, request.url, self.retries.header
        if not _can_resend(request):
            raise refuse_body(method, str(url))
        keyed = httpx.Request(
            method,
            url,
            headers=request.headers,
            stream=request.stream,
            extensions=request.extensions,
        )
        if _KEY in request.extensions:
            keyed.headers[header] = self.retries.header_value(key)
        elif header not in keyed.headers:
            keyed.headers[header] = self.retries.header_value(new_key(method, str(url)))
        return keyed

    async def _attempts(
        self, request: httpx.Request, send: Any, read: Any, close: Any, sleep: Any
    ) -> httpx.Response:
        """The response that holds for each attempt. The functions may be async."""
        call = Call(self.retries, request.headers[self.retries.header])
        while True:
            call.begin()
            try:
                response = await _result_of(send(request))
                if response.status_code >= _ERRORS:
                    await _result_of(read(response))  # despite stream=True
            except Exception as error:
                wait = call.failed(error, sent=not isinstance(error, _NOT_SENT))
                if wait is None:
                    raise
            else:
                try:
                    wait = call.received(response)
                except OutcomeUnknown:
                    await _result_of(close(response))  # despite stream=True
                    raise
                if wait is None:
                    return response  # type: ignore[no-any-return]
                await _result_of(close(response))
            await _result_of(sleep(wait))


class IdempotentClient(_Keyed, httpx.Client):
    """An ``httpx.Client`` that sends unsafe requests with a key, and retries them with that key.

    ::

        client = IdempotentClient(base_url="https://shop.example.com")
        client.post("/charges/", json={"amount": 500}, extensions={"idempotency_key": key})

    Without ``idempotency_key``, a request gets a new key. Within an execution, it gets a key that
    is the same on each attempt at the execution. ``None`` turns key and retries off. A request with
    a key follows no redirect.

    A response is returned if it holds for each attempt. Each error of an attempt has the attribute
    ``idempotency_key``. Safe requests are sent as they are. A request of your own that you pass to
    ``send()`` is not changed: a copy of it gets the key, and is the response's ``request``.

    Args:
        args: as for ``httpx.Client``.
        options: those of :class:`~idempotency_django.client.retrying.Retries`, and those of
            ``httpx.Client``.

    Raises:
        OutcomeUnknown: raised by requests: no response holds for each attempt.
        ValueError: raised by requests: the key is invalid, or the body cannot be sent twice.
    """

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        keyed = self._keyed(request)
        if keyed is None:
            return super().send(request, **options)
        send = partial(super().send, **{**options, "follow_redirects": False})
        read, close = httpx.Response.read, httpx.Response.close
        return _finished(self._attempts(keyed, send, read, close, time.sleep))


class AsyncIdempotentClient(_Keyed, httpx.AsyncClient):
    """The same as :class:`IdempotentClient`, on ``httpx.AsyncClient``."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        keyed = self._keyed(request)
        if keyed is None:
            return await super().send(request, **options)
        send = partial(super().send, **{**options, "follow_redirects": False})
        read, close = httpx.Response.aread, httpx.Response.aclose
        return await self._attempts(keyed, send, read, close, anyio.sleep)


async def _result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _finished(flow: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The result of a coroutine that awaits nothing."""
    try:
        flow.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("A client that is not async awaited something.")


def _can_resend(request: httpx.Request) -> bool:
    """Whether the body can be sent again.

    The classes for bytes and forms work in sync and async code; those that wrap an iterator or a
    file work in one of them. A form has no known length if one of its files cannot be rewound.
    """
    stream = request.stream
    both = hasattr(stream, "__iter__") and hasattr(stream, "__aiter__")
    return both and "Transfer-Encoding" not in request.headers
