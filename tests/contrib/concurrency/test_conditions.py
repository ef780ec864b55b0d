"""The conditional headers, by the examples of RFC 9110 itself."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.utils.http import parse_http_date

from idempotency_django.contrib.concurrency.conditions import (
    Conditions,
    checked_etag,
    equal_strongly,
    equal_weakly,
    evaluate,
    version_etag,
)
from idempotency_django.errors import PreconditionFailed
from tests.contrib.concurrency.models import Base, Extended, Ticket

DATE = "Sat, 29 Oct 1994 19:43:31 GMT"  # of sections 13.1.3 and 13.1.4
THEN = parse_http_date(DATE)


def outcome(
    etag: str | None = '"xyzzy"',
    modified: float | None = None,
    *,
    exists: bool = True,
    safe: bool = False,
    **headers: str,
) -> int:
    """The status that the conditions lead to; 200 for going on."""
    try:
        goes_on = evaluate(
            Conditions.of({name.replace("_", "-"): value for name, value in headers.items()}),
            etag,
            modified,
            exists=exists,
            safe=safe,
        )
    except PreconditionFailed:
        return 412
    return 200 if goes_on else 304


@pytest.mark.parametrize(
    ("one", "other", "strong", "weak"),
    [
        ('W/"1"', 'W/"1"', False, True),
        ('W/"1"', 'W/"2"', False, False),
        ('W/"1"', '"1"', False, True),
        ('"1"', '"1"', True, True),
    ],
)
def test_comparison(one: str, other: str, strong: bool, weak: bool) -> None:
    """Section 8.8.3.2, the table, in both directions."""
    assert equal_strongly(one, other) is equal_strongly(other, one) is strong
    assert equal_weakly(one, other) is equal_weakly(other, one) is weak


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        ('"xyzzy"', True),
        ('"xyzzy", "r2d2xxxx", "c3piozzzz"', True),
        ('"r2d2xxxx","xyzzy"', True),
        ("*", True),
        ('W/"xyzzy"', False),
        ('"r2d2xxxx", "c3piozzzz"', False),
        ('""', False),
        ("xyzzy", False),
    ],
)
def test_if_match(header: str, matches: bool) -> None:
    """Section 13.1.1: the examples, by strong comparison."""
    assert outcome(If_Match=header) == (200 if matches else 412)


def test_if_match_of_nothing() -> None:
    """Where there is nothing, no ``If-Match`` holds, an asterisk included."""
    assert outcome(None, exists=False, If_Match="*") == 412
    assert outcome(None, exists=False, If_Match='"xyzzy"') == 412
    assert outcome(None, If_Match='"xyzzy"') == 412
    assert outcome(None, If_Match="*") == 200


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        ('"xyzzy"', True),
        ('W/"xyzzy"', True),
        ('"xyzzy", "r2d2xxxx", "c3piozzzz"', True),
        ('W/"xyzzy", W/"r2d2xxxx", W/"c3piozzzz"', True),
        ("*", True),
        ('"r2d2xxxx"', False),
    ],
)
def test_if_none_match(header: str, matches: bool) -> None:
    """Section 13.1.2: the examples, by weak comparison; 304 for a read, 412 for a change."""
    assert outcome(If_None_Match=header) == (412 if matches else 200)
    assert outcome(If_None_Match=header, safe=True) == (304 if matches else 200)
    assert outcome('W/"xyzzy"', If_None_Match=header, safe=True) == (304 if matches else 200)


def test_if_none_match_of_nothing() -> None:
    """``If-None-Match: *`` holds where there is nothing yet."""
    assert outcome(None, exists=False, If_None_Match="*") == 200


def test_tags_with_commas() -> None:
    """A comma within the quotation marks is a part of the tag (section 8.8.3)."""
    assert outcome('"a,b"', If_Match='"a,b"') == 200
    assert outcome('"b"', If_Match='"a,b"') == 412
    assert outcome('"a"', If_Match='"x", "a,b"') == 412


@pytest.mark.parametrize(("changed", "status"), [(THEN, 304), (THEN - 9, 304), (THEN + 1, 200)])
def test_if_modified_since(changed: float, status: int) -> None:
    """Section 13.1.3: for reads only, and only where the date is known."""
    assert outcome(modified=changed, safe=True, If_Modified_Since=DATE) == status
    assert outcome(modified=changed, If_Modified_Since=DATE) == 200
    assert outcome(safe=True, If_Modified_Since=DATE) == 200
    assert outcome(modified=changed, safe=True, If_Modified_Since="yesterday") == 200


@pytest.mark.parametrize(("changed", "status"), [(THEN, 200), (THEN + 0.9, 200), (THEN + 1, 412)])
def test_if_unmodified_since(changed: float, status: int) -> None:
    """Section 13.1.4: 412 where it was changed after the date; ignored where nobody knows."""
    assert outcome(modified=changed, If_Unmodified_Since=DATE) == status
    assert outcome(If_Unmodified_Since=DATE) == 200
    assert outcome(modified=changed, If_Unmodified_Since="yesterday") == 200


def test_precedence() -> None:
    """Section 13.2.2: a tag comes before a date, and ``If-Match`` before ``If-None-Match``."""
    later = THEN + 60
    assert outcome(modified=later, If_Match='"xyzzy"', If_Unmodified_Since=DATE) == 200
    assert outcome(modified=THEN, safe=True, If_None_Match='"a"', If_Modified_Since=DATE) == 200
    assert (
        outcome(modified=later, safe=True, If_None_Match='"xyzzy"', If_Modified_Since=DATE) == 304
    )
    assert outcome(If_Match='"a"', If_None_Match='"b"') == 412
    assert outcome(If_Match='"xyzzy"', If_None_Match='"b"') == 200
    assert outcome(If_Match='"xyzzy"', If_None_Match='"xyzzy"', safe=True) == 304
    assert outcome(If_Match='"a"', If_None_Match='"xyzzy"', safe=True) == 412
    assert outcome(modified=later, If_Unmodified_Since=DATE, If_None_Match='"b"') == 412


def test_etag_of_versions() -> None:
    """An object's ETag is its version, whatever the field is called."""
    assert version_etag(Ticket(version=3)) == '"3"'
    assert version_etag(Extended(revision=7)) == '"7"'
    assert version_etag(Base()) is None
    assert version_etag("nothing") is None


@pytest.mark.parametrize("etag", ["3", '"a b"', '"', 'w/"3"', ""])
def test_malformed(etag: str) -> None:
    """What is no ETag is refused, with its source."""
    with pytest.raises(ImproperlyConfigured, match=r"the view returned .* not an ETag"):
        checked_etag(etag, "the view")
    assert [checked_etag(fine, "") for fine in ('"3"', 'W/"3"', None)] == ['"3"', 'W/"3"', None]
