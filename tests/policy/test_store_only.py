"""``store_only()``: an allow-list of the statuses that are stored."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse

from idempotency_django import Policy
from idempotency_django.policy import store_only


def test_equal() -> None:
    """A policy that is made for each request is equal to the one before."""
    assert Policy(should_store=store_only(200)) == Policy(should_store=store_only(200))
    assert Policy(should_store=store_only(200)) != Policy(should_store=store_only(201))


@pytest.mark.parametrize("statuses", [(), (500,), (199,), (True,), ("200",), ((200, 201),)])
def test_refused(statuses: tuple[Any, ...]) -> None:
    """A list of nothing, and what is no status that can be stored, is refused where it is said."""
    with pytest.raises(ImproperlyConfigured, match="needs HTTP statuses from 200 to 499"):
        store_only(*statuses)


def test_members_of_an_enum() -> None:
    """A status may be a member of HTTPStatus."""
    wanted = store_only(HTTPStatus.CREATED)
    assert [wanted(None, HttpResponse(status=status)) for status in (200, 201)] == [False, True]
