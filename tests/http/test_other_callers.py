"""Whatever protects a view, and wherever: nobody receives what they may not receive, or no more.

One caller's response is stored under a key. Then others send the same request with the same key,
and the same caller does after losing the right to. Nobody is given a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from rest_framework.authtoken.models import Token

from tests.support.shared import effects, is_replay, new_key, post
from tests.support.ways import MIDDLEWARE, PERMISSION, WAYS, Way

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns = [path(way.path.removeprefix("/"), way.view) for way in WAYS]

every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
with_tokens = pytest.mark.parametrize(
    "way", [way for way in WAYS if way.tokens], ids=lambda way: way.name
)


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = MIDDLEWARE


@pytest.fixture
def users() -> Iterator[dict[str, User]]:
    """Alice and Bob, who may both do it."""
    allowed = Permission.objects.get(codename=PERMISSION.partition(".")[2])
    made = {name: User.objects.create_user(name) for name in ("alice", "bob")}
    for user in made.values():
        user.user_permissions.add(allowed)
    return made


def by_session(way: Way, key: str, user: User | None) -> HttpResponse:
    client = Client()
    if user is not None:
        client.force_login(user)
    return post(client, way.path, key)


def by_header(way: Way, key: str, authorization: str | None) -> HttpResponse:
    headers = {} if authorization is None else {"Authorization": authorization}
    return post(Client(), way.path, key, headers=headers)


def assert_nothing_given_away(response: HttpResponse) -> None:
    assert not is_replay(response), response.content
    assert b"alice" not in response.content


@every_way
def test_sessions(way: Way, users: dict[str, User]) -> None:
    """Another user, and nobody at all, are not given the response of the first."""
    key = new_key()
    first = by_session(way, key, users["alice"])
    assert (first.status_code, first.json()["by"]) == (201, "alice")
    assert is_replay(by_session(way, key, users["alice"]))
    assert_nothing_given_away(by_session(way, key, users["bob"]))
    assert_nothing_given_away(by_session(way, key, None))
    assert is_replay(by_session(way, key, users["alice"]))


@with_tokens
def test_tokens(way: Way, users: dict[str, User]) -> None:
    """Nor are another token, a rejected one, and a request without."""
    key = new_key()
    tokens = {name: f"Token {Token.objects.create(user=user)}" for name, user in users.items()}
    assert by_header(way, key, tokens["alice"]).status_code == 201
    assert is_replay(by_header(way, key, tokens["alice"]))
    for other in (tokens["bob"], "Token rejected", "nonsense", None):
        assert_nothing_given_away(by_header(way, key, other))
    Token.objects.get(user=users["alice"]).delete()
    assert_nothing_given_away(by_header(way, key, tokens["alice"]))


@every_way
def test_credentials_that_nobody_knows(way: Way, users: dict[str, User]) -> None:
    """Where no user is known, whatever credentials were presented are whose response it is."""
    key = new_key()
    first = by_header(way, key, "Bearer opaque-1")
    if first.status_code != 201:  # the view asks for a user
        assert effects() == 0
        return
    assert is_replay(by_header(way, key, "Bearer opaque-1"))
    for other in ("Bearer opaque-2", None):
        assert_nothing_given_away(by_header(way, key, other))
    assert effects() == 1
