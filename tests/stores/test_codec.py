"""All that is stored is written and read by the codec: where it changes, no plaintext is left."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.db import connections, transaction
from django.test import Client, override_settings
from django_redis import get_redis_connection

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    Relay,
    after_commit,
    process_due,
    publish,
)
from idempotency_django.contrib.messaging.dead_letters import keep, keep_raw
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.redis import RedisStore
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store, codec, stores
from idempotency_django.stores.codec import decode, decode_step, encode, encode_step
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Payload, Record, Step
from idempotency_django.testing import an_operation
from tests.contrib.messaging.outbox.conftest import Broker
from tests.contrib.messaging.webhooks import receivers
from tests.support.admin_pages import detail, member, page
from tests.support.servers import Server

INBOX = "/admin/idempotency_messaging/inboxmessage/"
OUTBOX = "/admin/idempotency_messaging/outboxmessage/"


@pytest.mark.parametrize(
    "payload",
    [
        Payload(201, (("Location", "/é/1"), ("Link", "a"), ("Link", "b")), b"\x00\xff"),
        Payload(204, (), b""),
        Payload(200, ((":reason", "Fine"),), None),
    ],
)
def test_response(payload: Payload) -> None:
    """A response is read as it was written, to the byte; a body that was not kept stays none."""
    stored = encode(payload)
    assert decode(*stored) == payload
    assert decode(stored[0], stored[1].encode(), stored[2]) == payload


@pytest.mark.parametrize("headers", ["", "{}", '"a"', "[1]", '[["a"]]', '[["a", 1]]'])
def test_what_nobody_wrote(headers: str) -> None:
    """What cannot have been written is refused, not guessed at."""
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or that of the headers
        decode(200, headers, b"")


def test_step() -> None:
    """A recovery point is read as it was written."""
    step = Step(name="charge", attempt=2, result="[1, null]")
    assert decode_step(encode_step(step)) == step


SECRET = "Zq7-plaintext"
HEADERS = (("Content-Type", "text/plain"), ("X-Name", SECRET))
RESPONSE = Payload(200, HEADERS, f"{SECRET} as bytes".encode())
STEPS = [
    Step(name="look up", attempt=1, result=f'"{SECRET}"'),
    Step(name="charge", attempt=1, result=f'{{"text": "{SECRET}"}}'),
]
USUAL = "idempotency_django.stores.database.DatabaseStore"


@pytest.fixture
def _reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest layer of the codec stores texts and bytes in the reverse order."""
    for name in ("dump", "load"):
        monkeypatch.setattr(codec, name, lambda content: content[::-1])


@pytest.fixture(params=list(settings.ALIASES))
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each database in turn, with all that is stored in it."""
    alias = settings.ALIASES[request.param]
    configured = {
        "MESSAGING_DATABASE": alias,
        "STORES": {"default": {"BACKEND": USUAL, "OPTIONS": {"using": alias}}},
        "OUTBOX": {"orders": {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}},
        "CONSUMERS": [f"{__name__}.billing"],
    }
    with override_settings(
        IDEMPOTENCY=configured, ROOT_URLCONF="tests.contrib.messaging.webhooks.with_admin"
    ):
        yield alias
    handled.clear()
    receivers.behaviour.clear()


def assert_sealed(*stored: object) -> None:
    """The secret is there, and only in reverse."""
    texts = [str(each) for each in stored]
    assert any(SECRET[::-1] in text for text in texts)
    plain = (SECRET, b64encode(SECRET.encode()).decode()[:16])
    assert not [text for text in texts if any(each in text for each in plain)]


def rows(using: str) -> Iterator[object]:
    """Each value in the tables of the package, by SQL of our own."""
    connection = connections[using]
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            if table.startswith("idempotency"):
                cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
                for value in (value for row in cursor.fetchall() for value in row):
                    yield bytes(value) if isinstance(value, memoryview) else value


def executed(store: Store) -> tuple[Claim, list[Claim]]:
    """Claims of which the responses are stored: one alone, and those of a batch."""
    claim = store.acquire(an_operation(lease=timedelta(seconds=99), path="/charges/"))
    assert isinstance(claim, Claim)
    if store.supports_steps:
        for step in STEPS:
            with store.durable("The step"):
                assert store.save_step(claim, step)
        assert list(store.steps(claim)) == STEPS
    assert store.complete(claim, RESPONSE)
    failed = store.acquire(an_operation(lease=timedelta(seconds=99)))
    assert isinstance(failed, Claim)
    assert store.fail(failed, f"ValueError: {SECRET}")
    batch = [an_operation() for _ in range(2)]
    with store.transaction():
        claims = [each for each in store.acquire_many(batch) if isinstance(each, Claim)]
        assert list(store.complete_many([(each, RESPONSE) for each in claims])) == [True, True]
    return claim, claims


def assert_replays(store: Store, claim: Claim, claims: list[Claim]) -> None:
    """All ways to read a record give its response."""
    with store.transaction():
        found = [store.acquire(each.operation) for each in claims]
        found += store.acquire_many([each.operation for each in claims])
    names = [(each.key, each.scope) for each in (claim, *claims)]
    read = [*found, *store.get_many(names), store.get(*names[0])]
    recalled = [store.recall(claim.operation)] if store.has_cache else []
    assert len(read) == 8
    for record in (*read, *recalled):
        assert isinstance(record, Record)
        assert record.payload == RESPONSE


@pytest.mark.usefixtures("_reversed")
@pytest.mark.django_db(transaction=True, databases="__all__")
class TestStores:
    """What each store keeps."""

    def test_memory(self) -> None:
        """In the memory of this process."""
        store = MemoryStore("memory")
        done = executed(store)
        assert_sealed(store._entries)
        assert_replays(store, *done)

    def test_redis(self, redis_server: Server, settings: Any) -> None:
        """In Redis."""
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        settings.CACHES = {"default": cache}
        store = RedisStore("redis")
        done = executed(store)
        redis = get_redis_connection("default")
        assert_sealed(*(redis.hgetall(key) for key in redis.keys("*")))
        assert_replays(store, *done)
        redis.connection_pool.disconnect()

    def test_database(self, using: str) -> None:
        """In rows of a database."""
        store = DatabaseStore("default", using=using)
        done = executed(store)
        assert_sealed(*rows(using))
        assert_replays(store, *done)

    def test_cache(self, using: str, settings: Any) -> None:
        """In the cache in front of a database."""
        backend = "django.core.cache.backends.locmem.LocMemCache"
        settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": __name__}}
        store = CachedStore("default", using=using)
        done = executed(store)
        cache = caches["default"]
        assert isinstance(cache, LocMemCache)
        assert_sealed(*cache._cache.values())
        assert_replays(store, *done)
        cache.clear()

    def test_pages(self, using: str) -> None:
        """The admin shows a response, and the timeline the results of its steps."""
        claim, _ = executed(stores["default"])
        row = IdempotencyKey.objects.using(using).get(pk=claim.record_id)
        shown = page(member("view_idempotencykey", "view_response"), detail(row))
        assert f"{SECRET} as bytes" in shown
        assert shown.count(SECRET) >= 4


billing = Consumer("billing")
handled: list[Any] = []


@billing.on("order.paid")
def handle(event: Event, execution: Any) -> None:
    """Notes what it gets."""
    handled.append(event.data)


def call(name: str) -> None:
    """What is called after a commit."""
    handled.append(name)


@pytest.mark.usefixtures("_reversed")
@pytest.mark.django_db(transaction=True, databases="__all__")
class TestMessages:
    """What the tables of messages keep."""

    def test_outbox(self, using: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The broker gets what was published, as JSON and as bytes, and the admin shows it."""
        monkeypatch.setattr(Broker, "got", [])
        with transaction.atomic(using=using):
            publish("orders", {"name": SECRET}, type="n", headers={"name": SECRET})
            publish("orders", SECRET.encode(), type="n")
        assert_sealed(*rows(using))
        Relay().drain()
        assert [message.data for message in Broker.got] == [{"name": SECRET}, SECRET.encode()]
        assert Broker.got[0].headers["name"] == SECRET
        reader = member("view_outboxmessage", "view_outbox_payload")
        number = OutboxMessage.objects.using(using).get(is_base64=False).pk
        assert page(reader, f"{OUTBOX}{number}/change/").count(SECRET) == 2

    def test_call(self, using: str) -> None:
        """A function that is called after the commit gets its arguments."""
        with transaction.atomic(using=using), pytest.MonkeyPatch.context() as patched:
            patched.setattr(transaction, "on_commit", lambda *_, **__: None)  # the relay's turn
            after_commit(call, SECRET)
        assert_sealed(*rows(using))
        Relay().drain()
        assert handled == [SECRET]

    def test_webhook(self, using: str) -> None:
        """A handler gets the body that was received, at its retry as well; the admin shows it."""
        seen: list[Any] = []

        def fail_once(event: Event, execution: Any) -> None:
            seen.append(event.data["name"])
            if len(seen) == 1:
                raise ValueError(SECRET)

        receivers.behaviour["steps"] = fail_once
        body = receivers.body_of(name=SECRET)
        response = receivers.deliver(receivers.Stepping, body=body, headers={"X-Name": SECRET})
        assert response.status_code < 300
        assert_sealed(*rows(using))
        process_due()
        assert_sealed(*rows(using))
        InboxMessage.objects.using(using).update(process_after="2000-01-01T00:00Z")
        process_due()
        assert seen == [SECRET, SECRET]
        assert_sealed(*rows(using))
        reader = member("view_inboxmessage", "view_body")
        number = InboxMessage.objects.using(using).get().pk
        assert SECRET in page(reader, f"{INBOX}{number}/change/")

    def test_dead_letter(self, using: str) -> None:
        """A message that a consumer has dead-lettered is handled after the retry of an operator."""
        event = Event(id="e-1", source="/shop", type="order.paid", data={"name": SECRET})
        keep(billing, event, ValueError())
        keep_raw(billing, "orders/0/1", SECRET.encode(), ValueError(), [("name", SECRET)])
        assert_sealed(*rows(using))
        number = InboxMessage.objects.using(using).get(type="order.paid").pk
        settler: Client = member("view_inboxmessage", "settle_message", "view_body")
        assert SECRET in page(settler, f"{INBOX}{number}/change/")
        settler.post(f"{INBOX}{number}/retry/")
        process_due()
        assert handled == [{"name": SECRET}]
