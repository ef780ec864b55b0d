"""What is measured: the variants of the view, behind the WSGI interface, and of the function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any, Final

from benchmarks.functions import protected
from benchmarks.project import ORDER, application, new_key, order
from benchmarks.timing import Block, Sample

Call = Callable[[str], Sample]
"""Makes a request, or calls a function, with a key."""


class Subject:
    """Something to call, and the keys of its latest first calls."""

    def __init__(self, call: Call) -> None:
        self._keys: Sequence[str] = ()
        self._call = call

    def first(self, calls: int) -> Block:
        """A block of calls with new keys."""

        def block() -> Iterator[Sample]:
            self._keys = [new_key() for _ in range(calls)]
            return map(self._call, self._keys)

        return block

    def replays(self) -> Iterator[Sample]:
        """A block that repeats the first calls."""
        return map(self._call, self._keys)


def view(variant: str) -> Call:
    """A POST to this variant of the view, which must return 201."""
    app = application(variant)

    def post(key: str) -> Sample:
        statuses: list[str] = []
        environ = _environ(f"/{variant}/", key)

        def respond() -> bytes:
            response = app(environ, lambda status, headers: statuses.append(status))
            content = b"".join(response)
            response.close()
            return content

        sample, content = _timed(respond)
        assert statuses == ["201 Created"], (variant, statuses, content)
        return sample

    return post


def function(variant: str) -> Call:
    """A call of this variant of the function."""
    fn = protected(variant)

    def call(key: str) -> Sample:
        sample, result = _timed(lambda: fn(key, ORDER))
        assert result["amount"] == ORDER["amount"], result
        return sample

    return call


CALLS: Final[dict[str, Callable[[str], Call]]] = {"view": view, "function": function}


def _timed(work: Callable[[], Any]) -> tuple[Sample, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    cpu = time.process_time() - cpu
    return Sample(time.perf_counter() - wall, cpu), result


def _environ(path: str, key: str) -> dict[str, object]:
    body = order()
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_ACCEPT": "application/json",
        "HTTP_HOST": "localhost",
        "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
        "wsgi.input": BytesIO(body),
        "wsgi.url_scheme": "http",
    }
