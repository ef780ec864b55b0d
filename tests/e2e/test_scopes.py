"""Whose response a key leads to: only ever one's own, and only while one may ask."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from .clients import PROTECTED, Api, Order
from .conftest import Server

pytestmark = pytest.mark.e2e

CREATE = """
from django.contrib.auth.models import Permission, User
from rest_framework.authtoken.models import Token
user = User.objects.create(username={name!r})
user.user_permissions.add(Permission.objects.get(codename="add_effect"))
Token.objects.create(user=user, key={name!r})
"""
WITHDRAW_TOKEN = """
from rest_framework.authtoken.models import Token
Token.objects.get(user__username={name!r}).delete()
"""
WITHDRAW_PERMISSION = """
from django.contrib.auth.models import User
User.objects.get(username={name!r}).user_permissions.clear()
"""


@pytest.fixture
def customer(server: Server) -> str:
    """A user of this test's own; the name is the token too."""
    name = uuid.uuid4().hex
    server.shell(CREATE.format(name=name))
    return name


@pytest.mark.parametrize("path", PROTECTED)
def test_another_user_has_keys_of_their_own(api: Api, path: str) -> None:
    """Bob, who sends Alice's request with Alice's key, causes an effect of his own."""
    order = Order()
    alices = api.send(path, order)

    bobs = api.send(path, replace(order, token="bob-token"))

    assert bobs.status_code == 201
    assert "Idempotent-Replayed" not in bobs.headers
    assert bobs.json()["id"] != alices.json()["id"]
    assert api.effects(order) == 2


def test_nothing_is_replayed_once_the_token_is_withdrawn(
    server: Server, api: Api, customer: str
) -> None:
    """Who can no longer prove who they are does not receive even their own responses."""
    orders = {path: Order(token=customer) for path in PROTECTED}
    for path, order in orders.items():
        assert api.send(path, order).status_code == 201

    server.shell(WITHDRAW_TOKEN.format(name=customer))

    responses = [api.send(path, order) for path, order in orders.items()]
    assert [response.status_code for response in responses] == [401] * len(PROTECTED)


def test_nothing_is_replayed_once_the_permission_is_withdrawn(
    server: Server, api: Api, customer: str
) -> None:
    """Who may no longer charge does not receive the response of an earlier charge."""
    order = Order(token=customer)
    assert api.send("/api/charges/", order).status_code == 201

    server.shell(WITHDRAW_PERMISSION.format(name=customer))

    response = api.send("/api/charges/", order)
    assert response.status_code == 403
    assert order.reference not in response.text
    assert api.effects(order) == 1
