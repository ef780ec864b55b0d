"""The suite of the project, as it was before anybody heard of ``--idempotency-replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

import pytest
import time_machine
from django.contrib.auth.models import User
from django.core import mail
from django.core.cache import cache
from django.test import AsyncClient, Client, TestCase
from rest_framework.authtoken.models import Token
from rest_framework.test import APIClient, APITestCase
from shop.models import Charge

from . import views

KEY = {"Idempotency-Key": "b2f6a1f0-6f0e-4c55-9f8e-3a9f6a2d1c00"}


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    cache.clear()


@pytest.fixture
def carol(db: None) -> User:
    return User.objects.create_user("carol", "carol@example.com", "secret")


@pytest.fixture
def api(carol: User) -> APIClient:
    client = APIClient()
    client.force_authenticate(carol)
    return client


class ChargeTests(APITestCase):
    """In the manner of unittest."""

    def setUp(self) -> None:
        self.user = User.objects.create_user("dave")
        self.client.force_login(self.user)

    def test_create(self) -> None:
        """One charge, with or without a key."""
        response = self.client.post("/charges/", {"reference": "a", "amount": 1})
        assert response.status_code == 201
        assert Charge.objects.count() == 1

    def test_update_and_delete(self) -> None:
        """PUT and DELETE."""
        pk = Charge.objects.create(reference="a", amount=1).pk
        data = {"reference": "b", "amount": 2}
        assert self.client.put(f"/charges/{pk}/", data).status_code == 200
        assert self.client.delete(f"/charges/{pk}/").status_code == 204
        assert not Charge.objects.exists()


def test_order(api: APIClient) -> None:
    """An order calls the provider once; the key that it needs is not added."""
    assert api.post("/orders/", {"reference": "a"}).status_code == 400
    with patch.object(views, "provider") as provider:
        response = api.post("/orders/", {"reference": "a"}, headers=KEY)
    assert response.status_code == 201
    assert response.data["id"] == Charge.objects.get().pk
    provider.assert_called_once_with(1)


def test_throttle(api: APIClient) -> None:
    """Three orders a day: the repeated requests do not count."""
    for number, status in enumerate([201, 201, 201, 429]):
        key = {"Idempotency-Key": f"key-{number}"}
        assert api.post("/orders/", {"reference": "a"}, headers=key).status_code == status


def test_race(transactional_db: None, idempotency_race: Callable[..., Any]) -> None:
    """Simultaneous orders are placed once."""
    carol = User.objects.create_user("carol")

    def send() -> Any:
        client = APIClient()
        client.force_authenticate(carol)
        return client.post("/orders/", {"reference": "race"}, headers=KEY)

    assert idempotency_race(send, n=3).executed == 1
    assert Charge.objects.count() == 1


def test_crash(transactional_db: None, idempotency_crash: Callable[..., Any]) -> None:
    """A transfer whose process dies is made once."""
    token = Token.objects.create(user=User.objects.create_user("carol"))
    client = APIClient(headers={"Authorization": f"Token {token}", **KEY})
    response = idempotency_crash(lambda: client.post("/transfers/"), at="after-effect")
    assert response.status_code == 201
    assert Charge.objects.count() == 1


def test_invoice(api: APIClient, django_capture_on_commit_callbacks: Any) -> None:
    """One e-mail after the commit."""
    with django_capture_on_commit_callbacks(execute=True) as callbacks:
        api.post("/invoices/", {"reference": "a"}, headers=KEY)
    assert {message.subject for message in mail.outbox} == {"Your invoice"}
    assert callbacks


def test_invoice_commits(transactional_db: None, carol: User) -> None:
    """The same in a test that commits."""
    client = APIClient()
    client.force_authenticate(carol)
    client.post("/invoices/", {"reference": "a"})
    assert mail.outbox


class LoginTests(TestCase):
    """Sessions."""

    def test_login(self) -> None:
        """The test stays logged in."""
        User.objects.create_user("erin", password="secret")
        data = {"name": "erin", "password": "secret"}
        assert self.client.post("/login/", data).status_code == 204
        assert self.client.session["_auth_user_id"]
        assert self.client.post("/login/", {**data, "password": "x"}).status_code == 403


def test_visits(client: Client, db: None) -> None:
    """A view that is exempt is sent once."""
    client.post("/visits/")
    assert Charge.objects.count() == 1


def test_upload(client: Client, db: None) -> None:
    """A file is read twice."""
    file = BytesIO(b"content")
    file.name = "a.txt"
    response = client.post("/uploads/", {"file": file})
    assert response.json() == {"size": 7}
    assert Charge.objects.get().reference == "content"


def test_queries(client: Client, db: None, django_assert_max_num_queries: Any) -> None:
    """A key is not added where queries are counted, and a second request is not counted."""
    file = BytesIO(b"content")
    with django_assert_max_num_queries(1):
        client.post("/uploads/", {"file": file})
    with django_assert_max_num_queries(8) as counted:
        client.post("/derived/", {"reference": "a"})
    assert len(counted) == len({query["sql"] for query in counted.captured_queries})


def test_frozen(client: Client, db: None) -> None:
    """Time stands still."""
    with time_machine.travel("2030-01-01", tick=False):
        assert client.post("/uploads/", {"file": BytesIO(b"x")}).status_code == 201
    assert Charge.objects.count() == 1


class AsyncTests(TestCase):
    """Async tests, with Django's own runner of them."""

    async def test_async(self) -> None:
        """The AsyncClient, and an async view."""
        response = await AsyncClient().post("/async/", headers=KEY)
        assert response.status_code == 201
        assert await Charge.objects.acount() == 1

    def test_async_view(self) -> None:
        """The same view, under WSGI."""
        assert self.client.post("/async/", headers=KEY).status_code == 201
        assert Charge.objects.count() == 1


def test_live_server(live_server: Any) -> None:
    """A live server is asked by clients that pytest does not know."""
    with urlopen(f"{live_server}/visits/", b"") as response:
        assert response.status == 204
    with urlopen(f"{live_server}/derived/", b"reference=a") as response:
        assert response.status == 201
    assert Charge.objects.count() == 2


@pytest.fixture
def leaving(client: Client, db: None) -> Iterator[None]:
    yield
    client.post("/leaving/")


@pytest.mark.usefixtures("leaving")
def test_teardown() -> None:
    """A fixture sends a request when the test has ended."""
