"""All clients behind one face, so that one test runs over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import httpx2
import requests

from idempotency_django.backoff import Backoff
from idempotency_django.client import AsyncIdempotentClient, IdempotentAdapter, IdempotentClient
from idempotency_django.client import httpx2 as on_httpx2

AT_ONCE = Backoff(timedelta(0), timedelta(0))


class Driver:
    """Sends a request with a client of its own; ``key`` is the caller's."""

    is_async = False
    library: Any = httpx

    def __init__(self, **options: Any) -> None:
        self.options = {"backoff": AT_ONCE, **options}

    def send(self, method: str, url: str, **how: Any) -> Any:
        raise NotImplementedError


class Httpx(Driver):
    client: Callable[..., Any] = IdempotentClient

    def send(
        self,
        method: str,
        url: str,
        *,
        redirects: bool = False,
        auth: Any = None,
        stream: bool = False,
        client: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        how = self._keyed(how)
        options = {"trust_env": False, "verify": False, "auth": auth, "timeout": 20}
        with type(self).client(**options, **(client or {}), **self.options) as http:
            if stream:
                with http.stream(method, url, follow_redirects=redirects, **how) as response:
                    response.read()
                    return response
            return http.request(method, url, follow_redirects=redirects, **how)

    @staticmethod
    def _keyed(how: dict[str, Any]) -> dict[str, Any]:
        if "key" in how:
            how["extensions"] = {"idempotency_key": how.pop("key")}
        return how

    def digest(self) -> Any:
        return self.library.DigestAuth("user", "password")


class AsyncHttpx(Httpx):
    client: Callable[..., Any] = AsyncIdempotentClient
    is_async = True

    def send(self, method: str, url: str, **how: Any) -> Any:
        return asyncio.run(self._send(method, url, **how))

    async def _send(
        self,
        method: str,
        url: str,
        *,
        redirects: bool = False,
        auth: Any = None,
        stream: bool = False,
        client: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        how = self._keyed(how)
        options = {"trust_env": False, "verify": False, "auth": auth, "timeout": 20}
        async with type(self).client(**options, **(client or {}), **self.options) as http:
            if stream:
                async with http.stream(method, url, follow_redirects=redirects, **how) as response:
                    await response.aread()
                    return response
            return await http.request(method, url, follow_redirects=redirects, **how)


class Httpx2(Httpx):
    client = on_httpx2.IdempotentClient
    library = httpx2


class AsyncHttpx2(AsyncHttpx):
    client = on_httpx2.AsyncIdempotentClient
    library = httpx2


class Requests(Driver):
    library = requests

    def send(
        self,
        method: str,
        url: str,
        *,
        redirects: bool = False,
        content: Any = None,
        key: str | None = None,
        stream: bool = False,
        client: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        adapter = IdempotentAdapter(**self.options)
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http://", adapter)
            if content is not None:
                how["data"] = content
            if key is not None:
                how["headers"] = {**how.get("headers", {}), "Idempotency-Key": key}
            response = session.request(
                method, url, allow_redirects=redirects, stream=stream, **{"timeout": 20, **how}
            )
            _ = response.content
            return response

    def digest(self) -> Any:
        return requests.auth.HTTPDigestAuth("user", "password")


DRIVERS = [Httpx, AsyncHttpx, Httpx2, AsyncHttpx2, Requests]
