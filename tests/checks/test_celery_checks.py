"""The system checks of Celery's tasks, broker and result backend."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from django.core.checks import CheckMessage, run_checks

from idempotency_django.checks.celery import check_celery
from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.policy import Policy


@pytest.fixture
def app() -> Iterator[Celery]:
    """The project's app, with a broker that delivers again after ten seconds."""
    before = Celery("before", set_as_current=False)
    with Celery("shop", broker="memory://", backend="redis://127.0.0.1:1/0") as app:
        app.conf.broker_transport_options = {"visibility_timeout": 10}
        for shared in [name for name in app.tasks if not name.startswith("celery.")]:
            del app.tasks[shared]  # of other tests: each new app gets them
        yield app
    before.set_current()
    Celery("default").set_current()


def declare(app: Celery, policy: Any) -> None:
    @app.task(base=IdempotentTask, name="shop.pay", shared=False, idempotency_policy=policy)
    def pay() -> None: ...


def ids(messages: Any) -> list[str | None]:
    found: list[CheckMessage] = list(messages)
    return [message.id for message in found]


def test_nothing_to_check(app: Celery) -> None:
    """A project without idempotent tasks is told nothing of its broker."""
    assert ids(check_celery()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"idempotency_policy": Policy()}, "has idempotency_policy=, but is not an IdempotentTask"),
        ({"key": "{order}"}, "has key=, but is not an IdempotentTask"),
        ({"idempotency": Policy()}, "has idempotency=, but is not an IdempotentTask"),
        (
            {"idempotency_policy": Policy(), "key": "{order}"},
            "has idempotency_policy= and key=, but is not",
        ),
    ],
)
def test_forgotten_base(app: Celery, options: dict[str, Any], said: str) -> None:
    """A task with the options of an idempotent one, and without its base, is named."""

    @app.task(name="shop.pay", shared=False, **options)
    def pay(order: str) -> None: ...

    @app.task(name="shop.plain", shared=False)
    def plain() -> None: ...

    [message] = check_celery()
    assert message.id == "idempotency_django.W061"
    assert f"The task shop.pay {said}" in message.msg
    assert "base=IdempotentTask" in str(message.hint)


def test_registered(app: Celery) -> None:
    """``manage.py check`` runs them, and they do not run the checks again."""
    declare(app, Policy(lease=timedelta(seconds=20)))
    assert ids(run_checks()).count("idempotency_django.W035") == 1


@pytest.mark.parametrize(("seconds", "found"), [(10, []), (11, ["idempotency_django.W035"])])
def test_visibility_timeout(app: Celery, seconds: int, found: list[str]) -> None:
    """A broker that delivers again before a lease is over only makes work."""
    declare(app, Policy(lease=timedelta(seconds=seconds)))
    messages = check_celery()
    assert ids(messages) == found
    assert all("shop.pay has a lease of 11 seconds" in message.msg for message in messages)


def test_without_a_visibility_timeout(app: Celery) -> None:
    """The default of Celery's brokers is longer than any sensible lease."""
    app.conf.broker_transport_options = {}
    declare(app, None)
    assert ids(check_celery()) == []


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (Policy(store="nowhere"), "E003"),
        (Policy(on_conflict="accepted"), "E019"),
    ],
)
def test_policy(app: Celery, policy: Any, found: str) -> None:
    """The policy of a task is checked as a view's is."""
    declare(app, policy)
    assert ids(check_celery())[0] == f"idempotency_django.{found}"
