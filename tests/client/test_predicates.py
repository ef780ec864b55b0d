"""The predicate in loops of tenacity and stamina, over whatever client there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import stamina
import tenacity

from idempotency_django.client import is_retryable, key_for

from .scripted import CUT, Reply, Scripted, scripted

HEADERS = {"Idempotency-Key": key_for("order", 17)}


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        server.script = [CUT, Reply(503), Reply(409, {"Retry-After": "0"}), Reply(422)]
        yield server


@pytest.mark.parametrize("post", [httpx.post, requests.post])
def test_tenacity(server: Scripted, post: Any) -> None:
    """Both the exceptions and the responses of a function are judged."""

    @tenacity.retry(
        retry=tenacity.retry_if_exception(is_retryable) | tenacity.retry_if_result(is_retryable),
        stop=tenacity.stop_after_attempt(5),
    )
    def charge() -> Any:
        return post(server.url, json={}, headers=HEADERS)

    assert charge().status_code == 422
    assert server.keys == [HEADERS["Idempotency-Key"]] * 4


@pytest.mark.parametrize("post", [httpx.post, requests.post])
def test_stamina(server: Scripted, post: Any) -> None:
    """``raise_for_status()`` makes exceptions of responses; they count by their response."""

    @stamina.retry(on=is_retryable, wait_initial=0, wait_max=0, wait_jitter=0)
    def charge() -> Any:
        return post(server.url, json={}, headers=HEADERS).raise_for_status()

    with pytest.raises((httpx.HTTPStatusError, requests.HTTPError)):
        charge()
    assert len(server.keys) == 4
