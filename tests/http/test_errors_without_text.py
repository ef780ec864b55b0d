"""An error whose text cannot be made is handled with a key as without one."""

from __future__ import annotations

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.decorators import idempotent
from tests.support.shared import new_key, post, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Unprintable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def view(request: HttpRequest) -> HttpResponse:
    raise Unprintable


urlpatterns = [
    path("transactional/", csrf_exempt(idempotent(view))),
    path("leased/", csrf_exempt(idempotent(mode="leased")(view))),
]


@pytest.mark.parametrize("where", ["transactional", "leased"])
def test_error_without_a_text(client: Client, where: str) -> None:
    """It is raised as itself, the key is free again, and the record names its class."""
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(Unprintable):
            post(client, f"/{where}/", key)
        row = record(key)
        assert (row.status, row.attempt) == ("failed", attempt)
        assert "Unprintable" in row.error
