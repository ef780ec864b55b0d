"""Both clients behind one face, so that one test runs over both."""

from __future__ import annotations

import asyncio
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
    def send(
        self,
        method: str,
        url: str,
        *,
        stream: bool = False,
        client: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        with IdempotentClient(**self._client(how, client)) as http:
            if stream:
                with http.stream(method, url, **how) as response:
                    response.read()
                    return response
            return http.request(method, url, **how)

    def _client(self, how: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
        """The options of the client; those of the request are in the words of httpx then."""
        how["follow_redirects"] = how.pop("redirects", False)
        if "key" in how:
            how["extensions"] = {"idempotency_key": how.pop("key")}
        plain = {"trust_env": False, "verify": False, "auth": how.pop("auth", None), "timeout": 20}
        return {**plain, **(given or {}), **self.options}


class AsyncHttpx(Httpx):
    is_async = True

    def send(self, method: str, url: str, **how: Any) -> Any:
        return asyncio.run(self.asend(method, url, **how))

    async def asend(
        self,
        method: str,
        url: str,
        *,
        stream: bool = False,
        client: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        async with AsyncIdempotentClient(**self._client(how, client)) as http:
            if stream:
                async with http.stream(method, url, **how) as response:
                    await response.aread()
                    return response
            return await http.request(method, url, **how)


DRIVERS = [Httpx, AsyncHttpx]
