"""``If-Match``, by the examples of RFC 9110 itself."""

from __future__ import annotations

import pytest

from idempotency_django.contrib.concurrency.conditions import compare, version_etag
from idempotency_django.contrib.concurrency.errors import PreconditionFailed
from tests.contrib.concurrency.models import Base, Country, Extended, Ticket


def outcome(if_match: str, etag: str | None = '"xyzzy"') -> int:
    """The status that the condition of a change leads to; 200 for going on."""
    try:
        compare(if_match, etag)
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
    assert outcome(header) == (200 if matches else 412)


def test_if_match_without_etag() -> None:
    """Where the object has no ETag, only the asterisk holds."""
    assert outcome('"xyzzy"', None) == 412
    assert outcome('"None", W/"None", None', None) == 412
    assert outcome("*", None) == 200


def test_etag_of_versions() -> None:
    """An object's ETag is its primary key and its version, whatever the field is called."""
    assert version_etag(Ticket(pk=17, version=3)) == '"17.3"'
    assert version_etag(Extended(pk=1, revision=7)) == '"1.7"'
    assert version_etag(Country(code='a"b', version=2)) == '"a%22b.2"'
    assert version_etag(Base()) is None
