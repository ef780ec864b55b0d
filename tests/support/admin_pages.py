"""The admin's pages of records: their addresses, those who open them, and what is read there."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.db import connections
from django.http import HttpResponse
from django.test import Client, override_settings

from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.stores.memory import MemoryStore
from tests.support.factories import StaffFactory

LIST = "/admin/idempotency_django/idempotencykey/"
ALIASES = list(settings.ALIASES.values())


@pytest.fixture(params=ALIASES, ids=list(settings.ALIASES))
def alias(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database that the default store uses."""
    backend = "idempotency_django.stores.database.DatabaseStore"
    store = {"BACKEND": backend, "OPTIONS": {"using": request.param}}
    with override_settings(IDEMPOTENCY={"STORES": {"default": store}}):
        yield request.param


def member(*permissions: str) -> Client:
    """A client of somebody with these permissions."""
    client = Client()
    client.force_login(StaffFactory(permissions=permissions))
    return client


def detail(made: IdempotencyKey, view: str = "change") -> str:
    """The address of a record's page."""
    return f"{LIST}{made.pk}/{view}/"


def page(client: Client, path: str, **query: Any) -> str:
    """What is to be read on a page."""
    response = client.get(path, query)
    assert response.status_code == 200, response.content
    return unescape(response.content.decode())


def ask(client: Client, action: str, *rows: Any, path: str = LIST, **given: Any) -> HttpResponse:
    """Choose an action for some rows of a list."""
    chosen = {"action": action, "_selected_action": [getattr(row, "pk", row) for row in rows]}
    return client.post(path, {**chosen, **given}, follow=True)


def act(client: Client, action: str, *rows: Any, path: str = LIST, **given: Any) -> HttpResponse:
    """Do it, after having been asked."""
    return ask(client, action, *rows, path=path, confirmed="1", **given)


def messages(response: HttpResponse) -> list[str]:
    """What the page tells of what was done."""
    return [str(message) for message in response.context["messages"]]


class Recalling(MemoryStore):
    """A store that recalls responses, and notes what it is told to forget, and when."""

    has_cache = True
    noted: ClassVar[list[tuple[str, str, str]]]

    def forget(self, key: str, scope: str) -> None:
        using = stores["default"].using
        pending = using is not None and connections[using].in_atomic_block
        self.noted.append((key, scope, "uncommitted" if pending else "committed"))


@pytest.fixture
def forgotten(alias: str) -> Iterator[list[tuple[str, str, str]]]:
    """What a store that recalls responses is told to forget: key, scope, and when."""
    Recalling.noted = []
    configured = {
        **settings.IDEMPOTENCY["STORES"],
        "plain": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
        "recalling": {"BACKEND": f"{__name__}.Recalling"},
    }
    with override_settings(IDEMPOTENCY={"STORES": configured}):
        yield Recalling.noted
