"""Keys: the client's header in both forms, formats, and keys without a client."""

from __future__ import annotations

import json
import re
import uuid

import pytest
from django.test import RequestFactory, override_settings
from hypothesis import assume, example, given
from hypothesis import strategies as st

from idempotency_django.errors import KeyMalformed
from idempotency_django.http.invocations import key_header
from idempotency_django.policy import keys
from idempotency_django.policy.invocation import Form, Parsed
from tests.support.properties import ANY_TEXT, JSON, VISIBLE_ASCII, a_call

KEYS = st.text(VISIBLE_ASCII, min_size=1, max_size=255)
PARTS = st.text(VISIBLE_ASCII, min_size=1, max_size=100)
NOT_VISIBLE_ASCII = st.characters(max_codepoint=0x20) | st.characters(
    min_codepoint=0x7F, max_codepoint=0xFF
)
LATIN_1 = st.text(st.characters(max_codepoint=0xFF))


def refused(value: str) -> str:
    """What is said of a header value that is no key."""
    with pytest.raises(KeyMalformed) as caught:
        keys.parse_header(value)
    return str(caught.value)


# The header.


@given(KEYS)
@example('"')
@example("\\")
@example('a""b')
@example("x" * 255)
def test_quoted_key_is_itself(key: str) -> None:
    """Every key of visible ASCII without a comma, quoted as RFC 9651 says, names itself."""
    assume("," not in key)
    assert keys.parse_header(keys.quoted(key)) == key


@given(KEYS)
def test_both_forms_name_one_record(key: str) -> None:
    """A bare key, as Stripe's clients send it, is the same key as the quoted one."""
    assume("," not in key and '"' not in key)
    assert keys.parse_header(key) == key == keys.parse_header(keys.quoted(key))


@pytest.mark.parametrize("parameters", [";a", '; a="x,y";b=?0'])
def test_parameters_are_ignored(parameters: str) -> None:
    """An Item may have parameters (RFC 9651, section 3.3); none has a meaning here."""
    assert keys.parse_header('"8e03978e"' + parameters) == "8e03978e"


@given(ANY_TEXT | LATIN_1 | LATIN_1.map('"{}"'.format) | LATIN_1.map('"a";{}'.format))
@example("")
@example('"')
@example('"\\')
@example('""')
@example('"é"')
@example('"€"')
@example('"\ud800"')
@example('"a";b=@99999999999999')
@example('"a";b=%"%ff"')
@example("\x00")
def test_any_value_is_a_key_or_malformed(value: str) -> None:
    """Whatever arrives is one key of 1-255 visible ASCII characters, or KeyMalformed: no 500."""
    try:
        key = keys.parse_header(value)
    except KeyMalformed:
        return
    assert re.fullmatch(r"[\x21-\x7e]{1,255}", key)
    sent = value.strip(" \t")
    assert sent == key or sent.startswith(keys.quoted(key))


@given(KEYS, KEYS)
def test_header_sent_twice_is_refused(one: str, other: str) -> None:
    """Two header lines arrive joined by a comma, whoever joins them and in whichever form."""
    assume("," not in one + other and '"' not in one + other)
    for first in (one, keys.quoted(one)):
        for second in (other, keys.quoted(other)):
            for comma in (",", ", "):
                refused(first + comma + second)


@given(st.text(VISIBLE_ASCII.filter(lambda c: c != ","), min_size=256, max_size=300))
def test_too_long_key_is_refused(key: str) -> None:
    """A key has at most 255 characters, counted after its quotes and escapes are gone."""
    assert f"is {len(key)} characters long; at most 255" in refused(keys.quoted(key))


@given(PARTS, NOT_VISIBLE_ASCII, PARTS)
def test_anything_but_visible_ascii_is_refused(start: str, intruder: str, end: str) -> None:
    """A space, a control character or an accent inside a key is refused in both forms."""
    refused(keys.quoted(start + intruder + end))
    refused(start + intruder + end)


@pytest.mark.parametrize("value", ["", " ", "\t", '""', '"";a=1'])
def test_empty_key_is_refused(value: str) -> None:
    """An empty header is not an absent one: the client meant to send a key."""
    assert "empty" in refused(value)


@pytest.mark.parametrize("value", ['"a" "b"', '"a"b', '"a";', '"a";;', '"\\x"', '"a"\x0b'])
def test_more_than_one_string_is_refused(value: str) -> None:
    """What is not one Item is refused, with an example of what to send instead."""
    text = refused(value)
    assert "RFC 9651" in text
    assert '"8e03978e-40d5-43dd-bc93-6894a57f9324"' in text


@given(ANY_TEXT)
def test_checked_returns_the_key_itself(key: str) -> None:
    """A derived key is held to the same alphabet and length as a client's."""
    if re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        assert keys.checked(key) == key
    else:
        with pytest.raises(KeyMalformed):
            keys.checked(key)


def test_key_header_is_a_setting() -> None:
    """The key is in the header that the project names, in any case."""
    request = RequestFactory().post("/", headers={"idempotency-KEY": "k", "X-Request-Key": "x"})
    assert key_header(request) == "k"
    with override_settings(IDEMPOTENCY={"HEADER": "x-request-key"}):
        assert key_header(request) == "x"
    assert key_header(RequestFactory().post("/")) is None


# Formats.


@given(st.uuids())
def test_uuid_format(value: uuid.UUID) -> None:
    """Any UUID in its usual form, in capitals or not, is one."""
    assert keys.has_format(str(value), "uuid")
    assert keys.has_format(str(value).upper(), "uuid")
    assert not keys.has_format(value.hex, "uuid")
    assert not keys.has_format(f"{value}0", "uuid")


def test_regular_expression_matches_the_whole_key() -> None:
    """A format that is no name is a regular expression for all of the key."""
    assert keys.has_format("ord-123", r"ord-\d+")
    assert not keys.has_format("ord-123x", r"ord-\d+")
    assert not keys.has_format("xord-123", r"ord-\d+")
    assert not keys.has_format("ord-123\n", r"ord-\d+")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("8e03978e-40d5-43dd-bc93-6894a57f9324", True),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", True),
        ("V1StGXR8_Z5jdHi6B-myT", False),  # 21
        ("V1StGXR8_Z5jdHi6B-myTx", True),
        ("1", False),
        ("order-2024-0001", False),
        ("a key with spaces and more", False),
    ],
)
def test_unguessable(key: str, expected: bool) -> None:
    """A key that can hold 122 random bits counts as unguessable."""
    assert keys.is_unguessable(key) is expected


# Keys without a client.


@given(st.text(VISIBLE_ASCII, min_size=1) | st.integers())
def test_natural_key(value: str | int) -> None:
    """A natural key is the field's own text or number, from JSON at any depth."""
    key_of = keys.natural("order.number")
    assert key_of(a_call(Parsed({"order": {"number": value}}))) == str(value)


@pytest.mark.parametrize("value", [None, "", [], {}, ["A-1"], {"a": 1}, 1.5])
def test_natural_key_cannot_say(value: object) -> None:
    """What names nothing, or is no text and no whole number, gives no key."""
    assert keys.natural("order")(a_call(Parsed({"order": value}))) is None


@given(JSON, JSON)
def test_deterministic_key(one: object, other: object) -> None:
    """The same values of the chosen fields are the same key, whatever the others hold."""
    assume(one is not None)
    key_of = keys.deterministic("customer.id", "amount")
    key = key_of(a_call(Parsed({"customer": {"id": one}, "amount": 5, "note": other})))
    assert key == key_of(a_call(Parsed({"amount": 5, "customer": {"id": one}})))
    assert key == keys.checked(key or "")


@pytest.mark.parametrize("body", [b"", b"{}", b"not JSON", Form({}), Parsed([])])
def test_deterministic_key_cannot_say(body: object) -> None:
    """Without any of its fields there is no key: else all such requests would be one operation."""
    assert keys.deterministic("customer", "amount")(a_call(body)) is None


def test_generated_key() -> None:
    """Each request without a key is an operation of its own, under an unguessable key."""
    one, other = keys.generated(a_call()), keys.generated(a_call())
    assert one != other
    assert keys.is_unguessable(one)


# Identifiers of others.


@given(KEYS)
def test_valid_key_is_itself(key: str) -> None:
    """An identifier that is a valid key is taken as it is, unless it looks like a digest."""
    assume(not key.startswith("sha256:"))
    assert keys.fit(key) == key


@given(ANY_TEXT.filter(bool), ANY_TEXT.filter(bool))
@example("a" * 255, "a" * 256)
@example("caf\u00e9", "cafe\u0301")
@example("\ud800", "\udfff")
@example(" ", "  ")
def test_different_identifiers(one: str, other: str) -> None:
    """Any text makes a valid key, and another text another one, even one that looks like it."""
    fitted = keys.fit(one)
    assert keys.checked(fitted) == fitted == keys.fit(one)
    assert (keys.fit(other) == fitted) == (other == one)
    if fitted != one:
        assert keys.fit(fitted) != fitted


def test_no_identifier() -> None:
    """An identifier that is empty, or missing, names nothing."""
    with pytest.raises(KeyMalformed, match="empty"):
        keys.fit("")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("items.1.id", "7"),
        ("items.2.id", None),
        ("items.-1.id", None),
        ("named.0", "by name"),
    ],
)
def test_natural_key_in_a_list(path: str, expected: str | None) -> None:
    """A number in the path is a position in a list, or a member with that name."""
    body = {"items": [{"id": "A-1"}, {"id": 7}], "named": {"0": "by name"}}
    assert keys.natural(path)(a_call(Parsed(body))) == expected
    assert keys.natural(path)(a_call(json.dumps(body).encode())) == expected


def test_generated_key_without_the_header() -> None:
    """A new key for each request, which the client cannot send again, would protect nothing."""
    with pytest.raises(ValueError, match=r"Pass keys\.generated alone, or derive the key"):
        keys.instead_of_header(keys.generated)


def test_deterministic_key_needs_fields() -> None:
    """A hash of nothing would make all requests one operation."""
    with pytest.raises(ValueError, match="names of the fields"):
        keys.deterministic()
