"""The ids of messages: an attempt that is resumed publishes nothing a second time."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from idempotency_django.contrib.messaging import after_commit, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.outbox.publishing import uuid7
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.policy import Policy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("broker"),
    pytest.mark.driver,
]
LEASED = Policy(mode="leased")


class Crash(Exception):
    """The attempt ends here."""


def published() -> list[tuple[str, int]]:
    """The data and the number of each message."""
    rows = OutboxMessage.objects.order_by("pk")
    return list(rows.values_list("payload", "sequence"))


def call(function: Any, asked: Any = None) -> Any:
    """Call it under one key, again and again."""
    return idempotent_call(function, key="k", scope="s", fingerprint=asked, policy=LEASED)


def test_resumed() -> None:
    """What the first attempt has committed is not published again by the second."""
    ids: list[str] = []

    def handler(execution: Any) -> None:
        with execution.atomic():
            ids.append(publish("orders", 1, type="a", group="g"))
            ids.append(publish("orders", 1, type="a", group="g"))
        if execution.attempt == 1:
            raise Crash
        with execution.atomic():
            publish("orders", 2, type="a", group="g")

    with pytest.raises(Crash):
        call(handler)
    call(handler)
    assert published() == [("1", 1), ("1", 2), ("2", 3)]
    assert ids[:2] == ids[2:]
    assert len({*ids}) == 2


def test_resumed_with_other_data(caplog: pytest.LogCaptureFixture) -> None:
    """What the first attempt has committed stays as it is, and the log says so."""

    def handler(execution: Any) -> None:
        with execution.atomic():
            publish("orders", execution.attempt, type="a")
        if execution.attempt == 1:
            raise Crash

    with pytest.raises(Crash):
        call(handler)
    call(handler)
    assert published() == [("1", 0)]
    assert "an earlier attempt published it with other data" in caplog.text


def test_resumed_with_what_is_left() -> None:
    """An attempt that goes on with what is left tells its messages apart by their dedup ids."""
    sent: list[int] = []

    def handler(execution: Any) -> None:
        for number in [each for each in range(5) if each not in sent]:
            with execution.atomic():
                publish("orders", number, type="a", dedup_id=f"row {number}")
            sent.append(number)
            if execution.attempt == 1 and len(sent) == 2:
                raise Crash

    with pytest.raises(Crash):
        call(handler)
    call(handler)
    assert [payload for payload, _ in published()] == ["0", "1", "2", "3", "4"]


def test_steps() -> None:
    """A step that is not run again does not shift the ids of those after it."""

    def step(number: int) -> str:
        return publish("orders", number, type="a")

    def handler(execution: Any) -> None:
        execution.step("one", step, 1)
        if execution.attempt == 1:
            raise Crash
        execution.step("two", step, 2)

    with pytest.raises(Crash):
        call(handler)
    call(handler)
    assert published() == [("1", 0), ("2", 0)]


def test_rolled_back() -> None:
    """What was rolled back is not counted: the next attempt finds the same ids."""

    def handler(execution: Any) -> None:
        if execution.attempt == 1:
            with pytest.raises(Crash), execution.atomic():
                publish("orders", 1, type="a")
                raise Crash
        with execution.atomic():
            publish("orders", 1, type="a")
        if execution.attempt == 1:
            raise Crash

    with pytest.raises(Crash):
        call(handler)
    call(handler)
    assert published() == [("1", 0)]


@pytest.mark.parametrize(
    "write", [lambda: publish("orders", 1, type="a"), lambda: after_commit(len, [])]
)
def test_another_call_after_a_failure(write: Callable[[], str]) -> None:
    """What an attempt has published stays, so its key stays with what was asked for."""

    def handler(execution: Any) -> None:
        with execution.atomic():
            write()
        if execution.attempt == 1:
            raise Crash

    with pytest.raises(Crash):
        call(handler, 500)
    with pytest.raises(FingerprintMismatch):
        call(handler, 700)
    call(handler, 500)
    assert OutboxMessage.objects.count() == 1


def test_uuid7() -> None:
    """Ids outside of an operation are UUIDs of version 7: unique, and in the order of time."""
    ids = [uuid.UUID(uuid7()) for _ in range(1000)]
    assert len({*ids}) == 1000
    assert {(each.version, each.variant) for each in ids} == {(7, uuid.RFC_4122)}
    times = [each.int >> 80 for each in ids]
    assert times == sorted(times)
