"""What only the Redis store can show: round trips, scripts, faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django_redis import get_redis_connection
from redis import Connection, ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from idempotency_django.contrib.redis import RedisStore
from idempotency_django.errors import StoreUnavailable
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, eventually, in_threads
from idempotency_django.testing.contract import as_claim, as_record
from tests.support.redis_servers import client, give_up, replica_of, sentinel_of, url, valkey_at
from tests.support.servers import free_port

MOMENT = timedelta(milliseconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _disconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test connects is disconnected with it, and not some day, amid another test.

    Clients and what they hold refer to one another. Collected together, a socket may come first,
    and warns that nobody has closed it.
    """
    connected: list[Connection] = []
    connect = Connection.connect

    def noted(connection: Connection) -> None:
        connected.append(connection)
        connect(connection)

    monkeypatch.setattr(Connection, "connect", noted)
    yield
    for connection in connected:
        connection.disconnect()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server for all tests that do it no harm."""
    number = free_port()
    with valkey_at(number):
        yield number


@pytest.fixture
def redis(port: int) -> Iterator[Redis]:
    """What the server really holds."""
    with client(port) as asked:
        yield asked


@pytest.fixture
def store(port: int, settings: Any) -> Iterator[RedisStore]:
    """The store as most projects have it: over a cache of django-redis."""
    settings.CACHES = {"keys": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url(port)}}
    yield RedisStore("redis", cache="keys")
    get_redis_connection("keys").connection_pool.disconnect()


class Probe(Connection):
    """A connection that counts what it sends, and may break after the server has replied."""

    sent: ClassVar[int] = 0
    breaks: ClassVar[int] = 0

    def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        Probe.sent += 1
        super().send_packed_command(*args, **kwargs)

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().read_response(*args, **kwargs)
        if Probe.breaks:
            Probe.breaks -= 1
            self.disconnect()
            raise RedisConnectionError("The connection broke before the reply came.")
        return response


def probed(port: int, *, retries: int = 0, **options: Any) -> RedisStore:
    """A store with a warm connection, at which a test looks."""
    pool = ConnectionPool(
        connection_class=Probe,
        host="127.0.0.1",
        port=port,
        retry=Retry(NoBackoff(), retries),
        socket_timeout=30,
    )
    made = Redis(connection_pool=pool)
    made.ping()
    Probe.breaks = 0
    return RedisStore("probed", connection_factory=lambda: made, **options)


def at(port: int, **options: Any) -> RedisStore:
    made = client(port)
    return RedisStore("redis", connection_factory=lambda: made, **options)


def leased(**changes: Any) -> Operation:
    """An operation with a lease that lasts as long as a test."""
    return an_operation(**({"lease": HOUR} | changes))


def claim(store: RedisStore, operation: Operation) -> Claim:
    return as_claim(store.acquire(operation))


def found(store: RedisStore, operation: Operation) -> Record:
    """Ask for an operation that is not free."""
    return as_record(store.acquire(operation))


def stored(store: RedisStore, redis: Redis, operation: Operation) -> dict[bytes, bytes]:
    """What the server holds of it."""
    return redis.hgetall(store.redis_key(operation.key, operation.scope))


def test_round_trips(port: int) -> None:
    """A first request takes two round trips, a counted replay and a refusal one each."""
    store, operation = probed(port), leased(extend_on_replay=True)
    store.complete(claim(store, leased()), RESPONSE)  # makes the scripts known
    Probe.sent = 0
    owner = claim(store, operation)
    assert Probe.sent == 1
    assert found(store, operation).status is Status.IN_PROGRESS
    assert Probe.sent == 2
    assert store.complete(owner, RESPONSE)
    assert Probe.sent == 3
    assert found(store, operation).counted
    assert Probe.sent == 4


class TestLeases:
    """Owners, late owners and their successors."""

    def test_replays_are_counted(self, store: RedisStore, redis: Redis) -> None:
        """A replay is counted on the way, where that is asked for; another request never is."""
        operation = leased()
        store.complete(claim(store, operation), RESPONSE)
        assert [found(store, operation).counted for _ in range(3)] == [True] * 3
        assert not found(store, leased(key=operation.key, count_replays=False)).counted
        assert not found(store, leased(key=operation.key, fingerprint="0" * 64)).counted
        fields = stored(store, redis, operation)
        assert fields[b"replays"] == b"3"
        assert fields[b"last_replayed"] != b""
        store.record_replay(found(store, leased(key=operation.key)), operation)
        assert stored(store, redis, operation)[b"replays"] == b"5"
        gone = replace(found(store, operation), attempt=2)
        store.record_replay(gone, operation)
        assert stored(store, redis, operation)[b"replays"] == b"6"

    @pytest.mark.parametrize("seconds", [-600, 600])
    def test_clock_is_the_servers(
        self, store: RedisStore, monkeypatch: pytest.MonkeyPatch, seconds: int
    ) -> None:
        """The clock of the application's machine has no say."""
        operation = leased()
        claim(store, operation)
        there = __import__("time").time()
        monkeypatch.setattr("time.time", lambda: there + seconds)
        assert not found(store, operation).interrupted


def test_in_progress_outlives_its_lease(store: RedisStore, redis: Redis) -> None:
    """A record in progress lives longer than its lease, however short its time to live."""
    owner = claim(store, leased(ttl=MOMENT, lease=MINUTE))
    name = store.redis_key(owner.key, owner.scope)
    assert redis.pttl(name) > MINUTE / MOMENT
    assert store.extend(owner, 3600)
    assert redis.pttl(name) > HOUR / MOMENT


FIELDS = (
    "version key scope status attempt token fingerprint lease hold expires settled code headers "
    "size body"
).split()


class TestBrokenRecords:
    """What is no whole record is neither replayed nor executed."""

    @pytest.fixture(params=["in_progress", "completed", "failed"])
    def claimed(self, request: pytest.FixtureRequest, store: RedisStore) -> Claim:
        """A record in each state."""
        owner = claim(store, leased())
        if request.param == "completed":
            store.complete(owner, RESPONSE)
        elif request.param == "failed":
            store.fail(owner, "no")
        return owner

    @pytest.mark.parametrize("field", FIELDS)
    def test_missing_field(
        self, store: RedisStore, redis: Redis, claimed: Claim, field: str
    ) -> None:
        """A record that lacks a field."""
        redis.hdel(store.redis_key(claimed.key, claimed.scope), field)
        self.assert_untouched(store, redis, claimed)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("version", "2"),
            ("status", "done"),
            ("attempt", "one"),
            ("token", ""),
            ("lease", "soon"),
            ("key", "another"),
        ],
    )
    def test_wrong_value(
        self, store: RedisStore, redis: Redis, claimed: Claim, field: str, value: str
    ) -> None:
        """A record with a value that this store does not write."""
        redis.hset(store.redis_key(claimed.key, claimed.scope), field, value)
        self.assert_untouched(store, redis, claimed)

    def test_foreign_value(
        self, store: RedisStore, redis: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A key that something else wrote is logged, with what is wrong with it."""
        operation = leased()
        name = store.redis_key(operation.key, operation.scope)
        redis.set(name, "x")
        self.assert_untouched(store, redis, Claim(operation, 1, "token"))
        for said in (name, operation.key, "WRONGTYPE"):
            assert said in caplog.text

    def assert_untouched(self, store: RedisStore, redis: Redis, owner: Claim) -> None:
        name = store.redis_key(owner.key, owner.scope)
        before = redis.dump(name)
        steps: list[Callable[[], object]] = [
            lambda: store.acquire(owner.operation),
            lambda: store.get(owner.key, owner.scope),
            lambda: store.complete(owner, RESPONSE),
            lambda: store.fail(owner, "no"),
            lambda: store.extend(owner, 60),
        ]
        for step in steps:
            with pytest.raises(StoreUnavailable, match="is damaged"):
                step()
        store.record_replay(
            Record(key=owner.key, scope=owner.scope, status=Status.COMPLETED), owner.operation
        )
        assert redis.dump(name) == before


def test_flushed_scripts(port: int, store: RedisStore, redis: Redis) -> None:
    """Every step works when the server has forgotten the scripts."""

    def forgotten(step: Callable[[], Any]) -> Any:
        redis.script_flush()
        return step()

    owner = forgotten(lambda: claim(store, leased()))
    operation = owner.operation
    assert forgotten(lambda: store.extend(owner, 60))
    assert forgotten(lambda: store.fail(owner, "no"))
    second = forgotten(lambda: claim(store, operation))
    assert forgotten(lambda: store.complete(second, RESPONSE))
    record = forgotten(lambda: store.get(operation.key, operation.scope))
    assert record.payload == RESPONSE
    forgotten(lambda: store.record_replay(record, operation))
    assert forgotten(lambda: found(store, operation)).payload == RESPONSE
    assert stored(store, redis, operation)[b"replays"] == b"2"


class TestBrokenConnections:
    """A client that sends a call again, because its connection broke, gets the response to it."""

    def test_claim_is_the_same(self, port: int) -> None:
        """The claim of the first try is not in the way of the second."""
        store, operation = probed(port, retries=1), leased()
        Probe.breaks = 1
        owner = claim(store, operation)
        assert owner.attempt == 1
        assert Probe.breaks == 0
        assert found(store, operation).status is Status.IN_PROGRESS
        assert store.complete(owner, RESPONSE)

    def test_completion_is_the_same(self, port: int) -> None:
        """A completion that came true is not reported as lost; another one is still refused."""
        store = probed(port, retries=1)
        owner = claim(store, leased())
        Probe.breaks = 1
        assert store.complete(owner, RESPONSE)
        assert Probe.breaks == 0
        assert not store.complete(owner, Payload(200, (), b"other"))
        assert found(store, owner.operation).payload == RESPONSE

    def test_failure_is_the_same(self, port: int) -> None:
        """Nor is a failure."""
        store = probed(port, retries=1)
        owner = claim(store, leased())
        Probe.breaks = 1
        assert store.fail(owner, "no")
        assert not store.fail(owner, "again")

    def test_without_another_try(self, port: int) -> None:
        """Where the client does not try again, it is not known what happened."""
        store, operation = probed(port), leased(lease=MOMENT)
        Probe.breaks = 1
        with pytest.raises(StoreUnavailable):
            store.acquire(operation)
        eventually(lambda: store.get(operation.key, operation.scope).interrupted)  # type: ignore[union-attr]
        assert claim(store, operation).attempt == 2


class TestFaults:
    """Without Redis nothing is executed."""

    def assert_unavailable(self, store: RedisStore, owner: Claim) -> type[BaseException]:
        causes = set()
        for step in (
            lambda: store.acquire(leased()),
            lambda: store.complete(owner, RESPONSE),
            lambda: store.fail(owner, "no"),
            lambda: store.extend(owner, 60),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                step()
            assert caught.value.__cause__ is not None
            causes.add(type(caught.value.__cause__))
        [cause] = causes
        return cause

    def test_no_server(self, caplog: pytest.LogCaptureFixture) -> None:
        """Where no server is, the store is unavailable; a replay that cannot be counted is not."""
        store, owner = at(free_port()), Claim(leased(), 1, "token")
        assert self.assert_unavailable(store, owner) is RedisConnectionError
        with pytest.raises(StoreUnavailable):
            store.get(owner.key, owner.scope)
        record = Record(key=owner.key, scope=owner.scope, status=Status.COMPLETED)
        store.record_replay(record, owner.operation)
        assert "was not counted" in caplog.text

    def test_replica(self) -> None:
        """A server that is only a replica, as after a fail-over, takes no claim."""
        with valkey_at(port := free_port()), replica_of(port) as replica:
            owner = Claim(leased(), 1, "token")
            with pytest.raises(StoreUnavailable) as caught:
                at(replica).acquire(owner.operation)
            assert "read only replica" in str(caught.value.__cause__)

    def test_memory_is_full(self) -> None:
        """A full server takes no claim and no response, and still replays what it has."""
        with valkey_at(port := free_port()), client(port) as redis:
            store, operation = at(port), leased(extend_on_replay=True)
            store.complete(claim(store, operation), RESPONSE)
            owner = claim(store, leased())
            redis.config_set("maxmemory", 1)
            for step in (
                lambda: store.acquire(leased()),
                lambda: store.complete(owner, RESPONSE),
                lambda: store.extend(owner, 60),
            ):
                with pytest.raises(StoreUnavailable) as caught:
                    step()
                cause = caught.value.__cause__
                assert isinstance(cause, OutOfMemoryError) or "OOM" in str(cause)
            assert found(store, operation).payload == RESPONSE
            redis.config_set("maxmemory", 0)
            assert found(store, owner.operation).status is Status.IN_PROGRESS
            assert store.complete(owner, RESPONSE)

    def test_server_hangs(self) -> None:
        """A server that does not reply in time may have claimed; the lease ends that."""
        with valkey_at(port := free_port()) as server:
            made = Redis(port=port, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
            store = RedisStore("redis", connection_factory=lambda: made)
            claim(at(port), leased())
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(StoreUnavailable):
                    store.acquire(leased())
            finally:
                os.kill(server.pid, signal.SIGCONT)

    def test_restarted(self) -> None:
        """A claim is lost with a server that keeps nothing on disk, and so is its completion."""
        port = free_port()
        store, operation = at(port), leased()
        with valkey_at(port):
            owner = claim(store, operation)
        with pytest.raises(StoreUnavailable):
            store.complete(owner, RESPONSE)
        with valkey_at(port):
            assert not store.complete(owner, RESPONSE)
            assert not store.extend(owner, 60)
            assert store.get(operation.key, operation.scope) is None
            assert claim(store, operation).attempt == 1


class TestChecks:
    """What ``manage.py check`` says."""

    def ids(self, store: RedisStore) -> list[str]:
        return [str(message.id).removeprefix("idempotency_django.") for message in store.check()]

    def test_nothing_wrong(self, store: RedisStore) -> None:
        """Of a server that is as it should be: nothing."""
        assert self.ids(store) == []

    @pytest.mark.parametrize(
        ("cache", "said"),
        [
            ("nowhere", "The connection 'nowhere' doesn't exist"),
            ("memory", "The cache 'memory' cannot be used"),
            ("sharded", "ShardClient"),
            ("empty", "Missing connections string"),
        ],
    )
    def test_caches(self, settings: Any, cache: str, said: str) -> None:
        """A cache that is not there, or cannot be used for this, is an error."""
        ours = "django_redis.cache.RedisCache"
        sharded = {"CLIENT_CLASS": "django_redis.client.ShardClient"}
        settings.CACHES = {
            "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
            "sharded": {"BACKEND": ours, "LOCATION": [url(1), url(2)], "OPTIONS": sharded},
            "empty": {"BACKEND": ours, "LOCATION": ""},
        }
        store = RedisStore("redis", cache=cache)
        assert self.ids(store) == ["E003"]
        assert said in store.check()[0].msg
        with pytest.raises(ImproperlyConfigured):
            store.acquire(leased())

    @pytest.mark.parametrize("factory", ["nowhere.client", "builtins.dict"])
    def test_factories(self, factory: Any) -> None:
        """So is a factory that cannot be imported, or makes something else."""
        assert self.ids(RedisStore("redis", connection_factory=factory)) == ["E003"]

    def test_unreachable(self) -> None:
        """That there is no server now is a warning."""
        assert self.ids(at(free_port())) == ["W016"]

    def test_hanging(self) -> None:
        """So is a server that does not reply, for which the check does not wait long."""
        with valkey_at(port := free_port()) as server:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            try:
                made = Redis(port=port, socket_timeout=600)
                assert self.ids(RedisStore("redis", connection_factory=lambda: made)) == ["W016"]
            finally:
                os.kill(server.pid, signal.SIGCONT)

    def test_eviction(self) -> None:
        """A server that forgets when it is full is warned of."""
        with valkey_at(port := free_port(), "--maxmemory-policy", "allkeys-lru"):
            assert self.ids(at(port)) == ["W015"]


def test_fail_over(settings: Any) -> None:
    """After a fail-over a claim that the replica had received is still its owner's."""
    with (
        valkey_at(port := free_port()) as primary,
        replica_of(port) as replica,
        sentinel_of(port, "keys") as sentinel,
    ):
        options = {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", sentinel)],
            "SOCKET_TIMEOUT": 30,
        }
        backend = "django_redis.cache.RedisCache"
        settings.CACHES = {
            "keys": {"BACKEND": backend, "LOCATION": "redis://keys/0", "OPTIONS": options}
        }
        store = RedisStore("redis", cache="keys")
        assert store.check() == []
        owner = claim(store, leased())
        with client(replica) as redis:
            eventually(lambda: stored(store, redis, owner.operation))
        assert primary.pid is not None
        os.kill(primary.pid, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            store.acquire(leased())
        give_up(sentinel, "keys")
        eventually(lambda: isinstance(asked_of(store, leased()), Claim))
        assert found(store, owner.operation).status is Status.IN_PROGRESS
        assert store.complete(owner, RESPONSE)
        get_redis_connection("keys").connection_pool.disconnect()


def asked_of(store: RedisStore, operation: Operation) -> Claim | Record | None:
    """What the store says; ``None``: it is unavailable."""
    try:
        return store.acquire(operation)
    except StoreUnavailable:
        return None


class TestFactory:
    """A client of the project's own making."""

    def test_called_once(self, port: int) -> None:
        """The factory is called once, however many threads begin at the same moment."""
        calls = []
        again = threading.Event()

        def factory() -> Redis:
            calls.append(1)
            if len(calls) > 1:
                again.set()
            again.wait(0.2)  # which is only over sooner where there is a second call
            return client(port)

        store = RedisStore("redis", connection_factory=factory)
        in_threads([lambda: store.acquire(leased())] * 8)
        assert len(calls) == 1

    def test_called_again_after_a_fault(self, port: int) -> None:
        """A factory that cannot reach the server is called again for the next request."""
        faults = [RedisConnectionError("no")]

        def factory() -> Redis:
            if faults:
                raise faults.pop()
            return client(port)

        store = RedisStore("redis", connection_factory=factory)
        with pytest.raises(StoreUnavailable):
            store.acquire(leased())
        claim(store, leased())
