"""``on_expired="refuse"``: an expired key is refused, and nothing is executed again."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.test import Client, override_settings
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.engine.running import ObservedExecution
from idempotency_django.errors import KeyExpired
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores import stores
from tests.support.shared import assert_problem, assert_replays, effects, new_key, post, record
from tests.support.views import acreate, create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LONG = Policy(ttl=HOUR, on_expired="refuse", retention=DAY)


ALLOWED = True


def allowed(request: Any, record: Any) -> None:
    if not ALLOWED:
        raise PermissionDenied


CHECKED = LONG.replace(check_replay=allowed)

urlpatterns = [
    path("checked/transactional/", idempotent(policy=CHECKED)(create)),
    path("checked/leased/", idempotent(policy=CHECKED, mode="leased")(create)),
    path("checked/async/", idempotent(policy=CHECKED)(acreate)),
    path("transactional/", idempotent(policy=LONG)(create)),
    path("leased/", idempotent(policy=LONG, mode="leased")(create)),
    path("async/", idempotent(policy=LONG)(acreate)),
    path(
        "sliding/", idempotent(policy=LONG, ttl=timedelta(hours=1), extend_on_replay=True)(create)
    ),
]


def age(duration: timedelta) -> None:
    """Let that time pass since all responses were stored."""
    for row in IdempotencyKey.objects.all():
        assert row.expires_at is not None
        IdempotencyKey.objects.filter(pk=row.pk).update(
            expires_at=DatabaseNow() + HOUR - duration,
            purge_at=DatabaseNow() + HOUR + DAY - duration,
        )


@pytest.mark.parametrize("where", ["transactional", "leased", "async", "sliding"])
def test_refused_while_it_is_retained(client: Client, where: str) -> None:
    """After ``ttl`` a retry is refused. When the record is purged, after ``retention``, the key is
    new.
    """
    url, key = f"/{where}/", new_key()
    first = post(client, url, key)
    assert_replays(first, post(client, url, key))
    assert record(key).purge_at == record(key).expires_at + DAY
    age(2 * HOUR)
    for _ in range(2):
        problem = assert_problem(post(client, url, key), 409, "key-expired")
        assert (problem["state"], problem["retryable"]) == ("executed", False)
        assert not problem["safe_new_key"]
    assert "Retry-After" not in post(client, url, key)
    other = post(client, url, key, reference="other")
    assert_problem(other, 422, "mismatch")
    assert stores["default"].purge(timedelta(0), 10) == 0
    assert (effects("a"), effects("other")) == (1, 0)
    age(2 * DAY)
    assert_problem(post(client, url, key), 409, "key-expired")
    assert stores["default"].purge(timedelta(0), 10) == 1
    assert post(client, url, key).status_code == 201
    assert effects() == 2


@pytest.mark.parametrize("where", ["transactional", "leased", "async"])
def test_access_that_was_lost(client: Client, where: str) -> None:
    """Who may not get a replay doesn't learn that the operation was executed, either."""
    key = new_key()
    post(client, f"/checked/{where}/", key)
    age(2 * HOUR)
    assert_problem(post(client, f"/checked/{where}/", key), 409, "key-expired")
    with mock.patch(f"{__name__}.ALLOWED", new=False):
        assert post(client, f"/checked/{where}/", key).status_code == 403
    assert effects() == 1


def test_call() -> None:
    """A call whose result has expired raises an error that says so, and hooks are told."""
    seen: list[str] = []

    def call() -> Any:
        return idempotent_call(lambda _: 17, key="k", scope="s", name="n", policy=LONG)

    assert call() == call() == 17
    age(2 * HOUR)
    with (
        override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [observer(seen)]}),
        pytest.raises(KeyExpired, match="'k' of n was executed, and its result has expired"),
    ):
        call()
    assert seen == ["expired"]


def observer(seen: list[str]) -> Any:
    @contextmanager
    def observe(execution: ObservedExecution) -> Any:
        yield
        seen.append(execution.outcome)

    return observe


def test_without_retention() -> None:
    """A policy that refuses needs a record to refuse by, and says so."""
    given: dict[str, Any] = {"key": "k", "scope": "s", "name": "n"}
    for mode in ("transactional", "leased"):
        policy = Policy(on_expired="refuse", mode=mode)
        with pytest.raises(ImproperlyConfigured, match="on_expired='refuse' and no retention"):
            idempotent_call(lambda _: 1, policy=policy, **given)
        with override_settings(IDEMPOTENCY={"POLICY": {"retention": DAY}}):
            assert idempotent_call(lambda _: 2, policy=policy, **given) == 2
