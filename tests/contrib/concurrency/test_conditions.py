"""The conditional headers, by the examples of RFC 9110 itself."""

from __future__ import annotations

import pytest

from idempotency_django.contrib.concurrency.conditions import compare, version_etag
from idempotency_django.contrib.concurrency.errors import PreconditionFailed
from tests.contrib.concurrency.models import Base, Extended, Ticket


def outcome(etag: str | None = '"xyzzy"', **headers: str) -> int:
    """The status that the conditions of a change lead to; 200 for going on."""
    try:
        compare({name.replace("_", "-"): value for name, value in headers.items()}, etag)
    except PreconditionFailed:
        return 412
    return 200


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        ('"xyzzy"', True),
        ('"r2d2xxxx","xyzzy"', True),
        ("*", True),
        ('W/"xyzzy"', False),
        ('"r2d2xxxx", "c3piozzzz"', False),
        ("xyzzy", False),
        ("", False),
    ],
)
def test_if_match(header: str, matches: bool) -> None:
    """Section 13.1.1: the examples, by strong comparison."""
    assert outcome(If_Match=header) == (200 if matches else 412)


def test_if_match_without_etag() -> None:
    """Where the object has no ETag, only the asterisk holds."""
    assert outcome(None, If_Match='"xyzzy"') == 412
    assert outcome(None, If_Match='"None", W/"None", None') == 412
    assert outcome(None, If_Match="*") == 200


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        ('"xyzzy"', True),
        ('W/"xyzzy", W/"r2d2xxxx", W/"c3piozzzz"', True),
        ("*", True),
        ('"r2d2xxxx"', False),
    ],
)
def test_if_none_match(header: str, matches: bool) -> None:
    """Section 13.1.2: the examples, by weak comparison."""
    assert outcome(If_None_Match=header) == (412 if matches else 200)


def test_both() -> None:
    """Section 13.2.2: both must hold."""
    assert outcome(If_Match='"a"', If_None_Match='"b"') == 412
    assert outcome(If_Match='"xyzzy"', If_None_Match='"b"') == 200
    assert outcome(If_Match='"xyzzy"', If_None_Match='"xyzzy"') == 412


def test_etag_of_versions() -> None:
    """An object's ETag is its version, whatever the field is called."""
    assert version_etag(Ticket(version=3), named_by_key=True) == '"3"'
    assert version_etag(Ticket(pk=17, version=3), named_by_key=False) == '"17.3"'
    assert version_etag(Extended(revision=7), named_by_key=True) == '"7"'
    assert version_etag(Base(), named_by_key=True) is None
