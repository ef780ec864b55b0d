"""For tests: a client that sends a key with each unsafe request, and can send it again."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from django.http.response import HttpResponseBase
from django.test import Client
from django.test.client import FakePayload

from ..conf import conf
from ..http import REPLAYED_HEADER, meta_name
from ..policy import UNSAFE_METHODS

BODY = "wsgi.input"


def copied_body(environ: dict[str, Any]) -> bytes | None:
    """Read the body of a request that is not sent yet, which stays readable.

    ``None``: it is not the test client's, so that it may be readable only once.
    """
    payload = environ.get(BODY)
    if payload is None:
        return b""
    if not isinstance(payload, FakePayload) or payload.read_started:
        return None
    body: bytes = payload.read()
    environ[BODY] = FakePayload(body)
    return body


class KeyedMixin:
    """Sends a new key with each unsafe request that has none."""

    _last: tuple[dict[str, Any], bytes] | None = None

    def request(self, **environ: Any) -> Any:
        """Send a request, as the client below does."""
        if environ.get("REQUEST_METHOD") in UNSAFE_METHODS:
            header = meta_name(conf.header)
            if header not in environ and header not in getattr(self, "defaults", {}):
                environ[header] = str(uuid4())
            body = copied_body(environ)
            self._last = None if body is None else ({**environ}, body)
        return super().request(**environ)  # type: ignore[misc]  # of the client below

    def retry(self) -> Any:
        """Send the last unsafe request again, with the same key and body.

        Returns:
            The response. Redirects are not followed.

        Raises:
            ValueError: there is no such request, or its body cannot be read again.
        """
        if self._last is None:
            raise ValueError(
                "There is no request to send again. Send a POST, PUT, PATCH or DELETE first. Its "
                "body must not be a stream of your own."
            )
        environ, body = self._last
        return self.request(**{**environ, BODY: FakePayload(body)})


class IdempotentTestClient(KeyedMixin, Client):
    """Django's test client, which sends a new key with each unsafe request. ::

        class ChargeTests(TestCase):
            client_class = IdempotentTestClient

            def test_a_retry_gets_the_first_response(self):
                first = self.client.post("/charges/", {"amount": 500})
                assert_replayed(first, self.client.retry())

    A request that has a key already, or a client with a key in its ``headers=``, keeps it.
    """


def assert_replayed(first: HttpResponseBase, second: HttpResponseBase) -> None:
    """Assert that the second response is a replay of the first: same status and body, and marked.

    Raises:
        AssertionError: it is not; it shows the difference.
    """
    wrong = []
    if second.get(REPLAYED_HEADER) != "true":
        wrong.append(f"it has no header {REPLAYED_HEADER}")
    if second.status_code != first.status_code:
        wrong.append(
            f"its status is {second.status_code}, not {first.status_code}: {_start(second)}"
        )
    elif getattr(first, "content", None) != getattr(second, "content", None):
        wrong.append(f"its body is {_start(second)}, not {_start(first)}")
    if wrong:
        raise AssertionError(f"The second response is not a replay: {', and '.join(wrong)}.")


def _start(response: HttpResponseBase) -> str:
    """The beginning of a response's body."""
    return repr(getattr(response, "content", b"")[:200].decode(errors="replace"))
