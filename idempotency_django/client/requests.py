"""An adapter for sessions of requests: the extra ``[requests]``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import NewConnectionError

from .retrying import DISCOVERY_PATH, SAFE_METHODS, Call, Retries, new_key, refuse_body

_ERRORS = 400
_KEEPS_METHOD = frozenset({307, 308})


class IdempotentAdapter(HTTPAdapter):
    """Sends unsafe requests of a session with a key, and retries them with that key.

    ::

        session = requests.Session()
        session.mount("https://", IdempotentAdapter())
        session.post(url, json={"amount": 500}, headers={"Idempotency-Key": key})

    Without the header, a request gets a new key. Within an execution, it gets a key that is the
    same on each attempt at the execution.

    A response is returned if it is final. Each exception has the attribute ``idempotency_key``.
    Safe requests are sent as they are.

    Args:
        options: those of :class:`~idempotency_django.client.retrying.Retries`, and those of
            ``HTTPAdapter`` other than ``max_retries``.

    Raises:
        OutcomeUnknown: raised by requests: there is no final response.
        ValueError: raised by requests: the key is invalid, the body cannot be sent twice, or the
            request was redirected to another origin.
    """

    def __init__(self, **options: Any) -> None:
        self.retries = Retries.taken_from(options)
        super().__init__(max_retries=0, **options)

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any
    ) -> requests.Response:
        method, url = request.method or "", request.url or ""
        if method in SAFE_METHODS:
            return super().send(request, stream, *args, **options)
        header = self.retries.header_of(method, url)
        if header is None:
            return super().send(request, stream, *args, **options)
        if not isinstance(request.body, bytes | str | None):
            raise refuse_body(method, url)
        if header not in request.headers:
            request.headers[header] = self.retries.header_value(new_key(method, url))
        value = request.headers[header]
        value = value.decode() if isinstance(value, bytes) else value
        call = Call(self.retries, value, method, url, header)
        with call.naming_key():
            send = partial(super().send, request, stream, *args, **options)
            response = _send_call(call, send, unread=stream)
            if response.is_redirect:  # the session copies the headers of this request
                target = urljoin(url, response.headers["Location"])
                kept = method if response.status_code in _KEEPS_METHOD else "GET"
                if call.leaves(kept, target):
                    del request.headers[header]
            return response

    def discover(self, url: str) -> None:
        """Use the lifetimes and the names of headers that a server publishes.

        Args:
            url: an address at the server, such as ``"https://shop.example.com"``.
        """
        request = requests.Request("GET", urljoin(url, DISCOVERY_PATH)).prepare()
        response = self.send(request)
        response.raise_for_status()
        self.retries.learn(response.json(), str(response.url))


def _send_call(
    call: Call, send: Callable[[], requests.Response], *, unread: bool
) -> requests.Response:
    while True:
        if inspect.isawaitable(call.begin()):
            raise TypeError("The journal of an adapter of requests cannot be async.")
        try:
            response = send()
            if not unread or response.status_code >= _ERRORS:
                _ = response.content  # here, as the session would read it too late
        except Exception as error:
            wait = call.failed(error, sent=_was_sent(error))
            if wait is None:
                raise
        else:
            wait = call.answered(response)
            if wait is None:
                return response
        time.sleep(wait)


def _was_sent(error: Exception) -> bool:
    """Whether the request may have reached the server."""
    if isinstance(error, requests.ConnectTimeout):
        return False
    causes = (getattr(cause, "reason", None) for cause in error.args)
    return not any(isinstance(cause, NewConnectionError) for cause in causes)
