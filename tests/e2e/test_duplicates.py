"""What becomes of many duplicates that arrive at the same moment."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from .clients import Answer, Api, Order
from .databases import Database

pytestmark = pytest.mark.e2e

PATH = "/api/charges/"
DUPLICATES = 50
KEYS = {"postgres": 200, "mariadb": 200, "sqlite": 20}
ROUNDS = 4


def verdict(answer: Answer, executed: Answer) -> str:
    """What an answer is, in relation to the one that was executed."""
    if answer is executed:
        return "executed"
    if answer.status == 409 and int(answer.headers["Retry-After"]) >= 1:
        return "in progress"
    replay = answer.status == 201 and answer.headers["Idempotent-Replayed"] == "true"
    same = (answer.body, answer.headers["Location"]) == (
        executed.body,
        executed.headers["Location"],
    )
    return "replayed" if replay and same else f"wrong: {answer}"


def executed_of(answers: list[Answer]) -> Answer:
    """The one answer that is neither a refusal nor a replay."""
    (executed,) = (
        answer
        for answer in answers
        if answer.status == 201 and "Idempotent-Replayed" not in answer.headers
    )
    return executed


def test_one_of_many_duplicates_is_executed(
    api: Api, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 50 duplicates at once, for each of many keys, one is executed; the others receive its
    answer or are told to come back. None fails.
    """
    told: Counter[str] = Counter()
    for _ in range(KEYS[database.name]):
        order = Order()
        answers = api.send_at_once(PATH, order, DUPLICATES)
        executed = executed_of(answers)
        told.update(verdict(answer, executed) for answer in answers)
        assert api.effects(order) == 1

    with capsys.disabled():
        print(f"\n{database.name}: {dict(told)}")
    assert set(told) <= {"executed", "replayed", "in progress"}
    assert told["executed"] == KEYS[database.name]
    assert told.total() == KEYS[database.name] * DUPLICATES


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_duplicates_do_not_queue_behind_the_first(
    api: Api, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the first works for two seconds, all others are answered; its answer comes last."""
    seconds = []
    for _ in range(ROUNDS):
        order = Order(fault="sleep-ms=2000")
        *refused, last = api.send_at_once(PATH, order, DUPLICATES)

        assert last is executed_of([*refused, last])
        assert {verdict(answer, last) for answer in refused} == {"in progress"}
        assert api.effects(order) == 1
        seconds += [answer.seconds for answer in refused]

    p99 = statistics.quantiles(seconds, n=100)[98]
    with capsys.disabled():
        print(f"\n{database.name}: the 99th percentile of a 409 is {p99 * 1000:.0f} ms")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_on_sqlite_duplicates_wait_for_the_first(api: Api, database: Database) -> None:
    """SQLite has one writer at a time: duplicates wait for the first and receive its answer."""
    order = Order(fault="sleep-ms=2000")

    answers = api.send_at_once(PATH, order, DUPLICATES)

    told = Counter(verdict(answer, executed_of(answers)) for answer in answers)
    assert told == {"executed": 1, "replayed": DUPLICATES - 1}
    assert api.effects(order) == 1
