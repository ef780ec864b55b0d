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

from .retrying import (
    SAFE_METHODS,
    Call,
    OutcomeUnknown,
    Retries,
    is_retryable,
    is_same_origin,
    new_key,
    refuse_body,
)

_ERRORS = 400
_REDIRECTED = "idempotency_redirected"
"""Among the hooks of a request, which the session passes on to its redirects. Plain data, because a
response can be pickled with its request.
"""


class IdempotentAdapter(HTTPAdapter):
    """Sends unsafe requests of a session with a key, and retries them with that key.

    ::

        session = requests.Session()
        session.mount("https://", IdempotentAdapter())
        session.post(url, json={"amount": 500}, headers={"Idempotency-Key": key})

    Without the header, a request gets a new key. Within an execution, it gets a key that is the
    same on each attempt at the execution.

    A response is returned if it holds for each attempt. Each exception has the attribute
    ``idempotency_key``. Safe requests are sent as they are, but without the key if a redirect has
    made them of an unsafe request.

    Args:
        options: those of :class:`~idempotency_django.client.retrying.Retries`, and those of
            ``HTTPAdapter`` other than ``max_retries``.

    Raises:
        OutcomeUnknown: raised by requests: no response holds for each attempt.
        ValueError: raised by requests: the key is invalid, the body cannot be sent twice, or the
            request was redirected to another origin.
    """

    __attrs__: list[str] = [*HTTPAdapter.__attrs__, "retries"]  # what is pickled

    def __init__(self, **options: Any) -> None:
        self.retries = Retries.taken_from(options)
        super().__init__(max_retries=0, **options)

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any
    ) -> requests.Response:
        method, url = request.method or "", request.url or ""
        if method in SAFE_METHODS:
            send = partial(super().send, request, stream, *args, **options)
            redirected: Any = request.hooks.get(_REDIRECTED)
            if redirected is None:
                return send()
            name, key, attempts = redirected
            request.headers.pop(name, None)
            return _send_redirected(send, key, attempts, unread=stream)
        header = self.retries.header
        if not isinstance(request.body, bytes | str | None):
            raise refuse_body(method, url)
        if header not in request.headers:
            request.headers[header] = self.retries.header_value(new_key(method, url))
        value = request.headers[header]
        value = value.decode() if isinstance(value, bytes) else value
        call = Call(self.retries, value, method, url)
        with call.naming_key():
            send = partial(super().send, request, stream, *args, **options)
            response = _send_call(call, send, unread=stream)
            if response.is_redirect:  # the session copies the headers of this request
                try:
                    target = urljoin(url, response.headers["Location"])
                    is_near = is_same_origin(url, target)
                except ValueError as error:  # it is no address
                    call.failed(error)
                    raise
                if call.drops_key(_redirected_method(method, response.status_code), target):
                    hooks: Any = request.hooks
                    hooks[_REDIRECTED] = (header, call.key, call.attempts)
                    if not is_near:  # maybe with another adapter
                        del request.headers[header]
            return response


def _send_call(
    call: Call, send: Callable[[], requests.Response], *, unread: bool
) -> requests.Response:
    while True:
        if inspect.isawaitable(call.begin()):
            raise TypeError("The journal of an adapter of requests cannot be async.")
        try:
            response = send()
            call.is_sent = True
            _read(response, unread=unread)
        except Exception as error:
            wait = call.failed(error, sent=call.is_sent or _was_sent(error))
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


def _send_redirected(
    send: Callable[[], requests.Response], key: str, attempts: int, *, unread: bool
) -> requests.Response:
    """Send the GET that a redirect has made of an unsafe request, which may have been executed."""
    reason = "the request was redirected, and the redirect failed"
    try:
        response = send()
        _read(response, unread=unread)
    except Exception as error:
        raise OutcomeUnknown(key, attempts, reason) from error
    if is_retryable(response):
        raise OutcomeUnknown(key, attempts, reason, response)
    return response


def _read(response: requests.Response, *, unread: bool) -> None:
    if not unread or response.status_code >= _ERRORS:
        _ = response.content  # here, as the session would read it too late


def _redirected_method(method: str, status: int) -> str:
    """The method of a redirected request, as the session chooses it."""
    return "GET" if status in (302, 303) or (status, method) == (301, "POST") else method


def _was_sent(error: Exception) -> bool:
    """Whether the request may have reached the server.

    The adapter refuses an address, a header or a timeout with a ``ValueError``, before it sends.
    """
    if isinstance(error, requests.ConnectTimeout | ValueError):
        return False
    causes = (getattr(cause, "reason", None) for cause in error.args)
    return not any(isinstance(cause, NewConnectionError) for cause in causes)
