"""The system check of Celery's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.core.checks import CheckMessage, run_checks

from idempotency_django.contrib.celery import check_celery
from idempotency_django.policy import Policy


@pytest.fixture
def app() -> Iterator[Celery]:
    """The project's app."""
    before = Celery("before", set_as_current=False)
    with Celery("shop", broker="memory://", backend="redis://127.0.0.1:1/0") as app:
        for shared in [name for name in app.tasks if not name.startswith("celery.")]:
            del app.tasks[shared]  # of other tests: each new app gets them
        yield app
    before.set_current()
    Celery("default").set_current()


def ids(messages: Any) -> list[str | None]:
    found: list[CheckMessage] = list(messages)
    return [message.id for message in found]


def test_nothing_to_check(app: Celery) -> None:
    """A project without tasks is told nothing."""
    assert ids(check_celery()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
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

    @app.task(name="shop.pay", shared=False, key="{order}")
    def pay(order: str) -> None: ...

    assert ids(run_checks()).count("idempotency_django.W061") == 1
