"""``send()`` of a client of httpx or httpx2, with keys and retries.

Not a transport: a transport does not notice that the connection is lost while the response is read.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import anyio

from .retrying import (
    SAFE_METHODS,
    Call,
    OutcomeUnknown,
    Retries,
    new_key,
    refuse_body,
)

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

KEY = "idempotency_key"
_CALL = "idempotency_call"
_NOT_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol"})
_ERRORS = 400


class _Keyed(Base):  # type: ignore[misc]  # the client, of either library
    _mind_key: Any  # a hook, which is async in an async client

    def __init__(self, *args: Any, **options: Any) -> None:
        self.retries = Retries.taken_from(options)
        super().__init__(*args, **options)

    def _begin_call(self, request: Any) -> Call | None:
        """Give the request its key; ``None``: it is sent as it is."""
        if request.method in SAFE_METHODS:
            return None
        retries, method, url = self.retries, request.method, str(request.url)
        header = retries.header
        if KEY in request.extensions:
            if (key := request.extensions[KEY]) is None:
                return None
            request.headers[header] = retries.header_value(key)
        if not _can_resend(request):
            raise refuse_body(method, url)
        if header not in request.headers:
            request.headers[header] = retries.header_value(new_key(method, url))
        call = Call(retries, request.headers[header], method, url)
        request.extensions = {**request.extensions, _CALL: call}
        hooks = self.event_hooks["request"]  # which also sees redirects
        if hooks[-1:] != [self._mind_key]:  # the last one, to see what the others do
            hooks[:] = [*(hook for hook in hooks if hook != self._mind_key), self._mind_key]
        return call

    def _check_key(self, request: Any) -> None:
        call = request.extensions.get(_CALL)
        if call is None:
            return
        if call.drops_key(request.method, str(request.url)):
            request.headers.pop(call.header, None)
        else:
            call.refuse_other_key(request.headers.get(call.header))
        call.is_sent = True  # as far as we know


class Sending(_Keyed):
    """Sends unsafe requests with a key, and retries them with the same key."""

    def send(self, request: Any, **options: Any) -> Any:
        call = self._begin_call(request)
        if call is None:
            return super().send(request, **options)
        with call.naming_key():
            while True:
                if inspect.isawaitable(call.begin()):
                    raise TypeError("The journal of a client that is not async cannot be async.")
                try:
                    response = super().send(request, **options)
                    if response.status_code >= _ERRORS:
                        response.read()  # despite stream=True
                except Exception as error:
                    wait = call.failed(error, sent=call.is_sent and _was_sent(request, error))
                    if wait is None:
                        raise
                else:
                    try:
                        wait = call.answered(response)
                    except OutcomeUnknown:
                        response.close()  # despite stream=True
                        raise
                    if wait is None:
                        return response
                    response.close()  # despite stream=True
                time.sleep(wait)

    def _mind_key(self, request: Any) -> None:
        self._check_key(request)


class AsyncSending(_Keyed):
    """The same for async code. The journal may be a coroutine function."""

    async def send(self, request: Any, **options: Any) -> Any:
        call = self._begin_call(request)
        if call is None:
            return await super().send(request, **options)
        with call.naming_key():
            while True:
                noted = call.begin()
                if inspect.isawaitable(noted):
                    await noted
                try:
                    response = await super().send(request, **options)
                    if response.status_code >= _ERRORS:
                        await response.aread()  # despite stream=True
                except Exception as error:
                    wait = call.failed(error, sent=call.is_sent and _was_sent(request, error))
                    if wait is None:
                        raise
                else:
                    try:
                        wait = call.answered(response)
                    except OutcomeUnknown:
                        await response.aclose()  # despite stream=True
                        raise
                    if wait is None:
                        return response
                    await response.aclose()  # despite stream=True
                await anyio.sleep(wait)

    async def _mind_key(self, request: Any) -> None:
        self._check_key(request)


def _can_resend(request: Any) -> bool:
    """Whether the body can be sent again.

    The classes for bytes and forms work in sync and async code; those that wrap an iterator or a
    file work in one of them. A form has no known length if one of its files cannot be rewound.
    """
    stream = request.stream
    both = hasattr(stream, "__iter__") and hasattr(stream, "__aiter__")
    return both and "Transfer-Encoding" not in request.headers


def _was_sent(request: Any, error: Exception) -> bool:
    """Whether the request may have reached the server.

    After a redirect, the request of the error is another one, and this one was sent.
    """
    not_sent = type(error).__name__ in _NOT_SENT
    return not (not_sent and getattr(error, "request", None) is request)
