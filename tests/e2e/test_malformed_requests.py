"""Requests that no client sends on purpose, over a real server."""

from __future__ import annotations

import pytest

from .clients import Api

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("path", ["/effects/", "/postings/"])
def test_reference_with_a_nul(api: Api, path: str) -> None:
    """PostgreSQL takes no NUL in a text: such a reference is a bad request, no error of ours."""
    assert api.get(f"{path}?reference=a%00b").status_code == 400
