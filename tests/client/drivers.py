"""Both clients behind one face, so that one test runs over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from idempotency_django.backoff import Backoff
from idempotency_django.client import AsyncIdempotentClient, IdempotentClient

AT_ONCE = Backoff(timedelta(0), timedelta(0))


class Driver:
    """Sends a request with a client of its own; ``key`` is the caller's."""

    is_async = False

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


DRIVERS = [Httpx, AsyncHttpx]
