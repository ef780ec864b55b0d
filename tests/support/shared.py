"""What the tests of the adapters share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_args
from uuid import uuid4

from django.contrib.auth.models import User
from django.db import connection, connections
from django.http import HttpResponse
from django.test import Client
from rest_framework import serializers

from idempotency_django.errors import State
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.records import Operation
from idempotency_django.testing import RESPONSE, an_operation, eventually, in_threads
from idempotency_django.testing.contract import as_claim
from tests.models import Effect

LONG_AGO = DatabaseNow() - timedelta(days=3650)
"""By the clock of the database, whether or not its columns know time zones."""


def logged_in(name: str) -> Client:
    """A client of a user who is logged in."""
    client = Client()
    client.force_login(User.objects.get_or_create(username=name)[0])
    return client


def new_key() -> str:
    """A key that nobody used."""
    return str(uuid4())


def post(
    client: Client, path: str, key: str | None = None, reference: str = "a", **options: Any
) -> HttpResponse:
    """POST a reference as JSON."""
    headers = options.pop("headers", {})
    if key is not None:
        headers = {"Idempotency-Key": f'"{key}"', **headers}
    method = getattr(client, options.pop("method", "post"))
    return method(
        path,
        json.dumps({"reference": reference}),
        content_type="application/json",
        headers=headers,
        **options,
    )


def effects(reference: str = "a", using: str | None = None) -> int:
    """How often something was really done, in the default database or another one."""
    return Effect.objects.using(using or "default").filter(reference=reference).count()


def effect_counts(using: str = "default") -> Counter[str]:
    """How many effects there are of each event or message."""
    return Counter(Effect.objects.using(using).values_list("reference", flat=True))


def record(key: str) -> IdempotencyKey:
    """The row of a key."""
    return IdempotencyKey.objects.get(key=key)


def is_replay(response: HttpResponse) -> bool:
    """Whether the response says that it is one."""
    return response.headers.get("Idempotent-Replayed") == "true"


def assert_replays(first: HttpResponse, second: HttpResponse, *own: str) -> None:
    """The second response is the first one again: status, bytes and headers but its own ones."""
    assert not is_replay(first)
    assert is_replay(second)
    assert second.status_code == first.status_code
    assert second.content == first.content
    # Vary grows by what the session middleware adds to each response on its way out.
    ignored = {"Idempotent-Replayed", "Idempotency-Status", "Vary", *own}
    assert {k: v for k, v in second.headers.items() if k not in ignored} == {
        k: v for k, v in first.headers.items() if k not in ignored
    }


def completed(store: Store, **changes: Any) -> Operation:
    """An operation that was executed."""
    operation = an_operation(**changes)
    with store.transaction():
        claim = as_claim(store.acquire(operation))
        assert store.complete(claim, RESPONSE)
    return operation


class EffectSerializer(serializers.ModelSerializer[Effect]):
    """Makes effects."""

    class Meta:
        model = Effect
        fields = ("id", "reference")


def assert_problem(response: HttpResponse, status: int, slug: str) -> dict[str, Any]:
    """The response is a problem (RFC 9457) of a type that the documentation explains."""
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = json.loads(response.content)
    assert problem["type"] == f"https://idempotency-django.readthedocs.io/problems/#{slug}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["code"] == slug
    assert problem["state"] in get_args(State)
    assert {type(problem["retryable"]), type(problem["safe_new_key"])} == {bool}
    return problem


def assert_guessable(response: HttpResponse) -> None:
    """The key of an anonymous caller is refused, because it could be guessed."""
    problem = assert_problem(response, 400, "key-malformed")
    assert "unguessable" in problem["detail"]
    assert problem["state"] == "unknown"


def cut_connection() -> None:
    """End the connection of this thread, from another one."""
    kill = {"postgresql": "SELECT pg_terminate_backend(%s)", "mysql": "KILL %s"}[connection.vendor]

    def cut(number: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(kill, [number])

    wait_for_end(cut, of=session_of_this_thread())


def close_connections(close: Callable[[], object] = connections.close_all) -> None:
    """Close the connections of this thread; the server keeps their locks until it notices."""
    number = None if connection.vendor == "sqlite" else session_of_this_thread()
    close()
    if number is not None and connection.connection is None:
        wait_for_end(of=number)


def session_of_this_thread() -> int:
    """The server's number for the connection of this thread."""
    number = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
    with connection.cursor() as cursor:
        cursor.execute(number[connection.vendor])
        return int(cursor.fetchone()[0])


def wait_for_end(begin: Callable[[int], object] = lambda _: None, *, of: int) -> None:
    """Begin to end a session, from another thread, and return when the server has ended it."""
    alive = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE pid = %s",
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE id = %s",
    }[connection.vendor]

    def gone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(alive, [of])
            return bool(cursor.fetchone() == (0,))

    in_threads([lambda: (begin(of), eventually(gone))])
