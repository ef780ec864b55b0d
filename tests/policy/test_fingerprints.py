"""Fingerprints: equal for a retry, different for anything else, and never an error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency_django.policy.digests import digest
from idempotency_django.policy.fingerprints import field_value, fields, whole_request
from idempotency_django.policy.invocation import Form, Parsed, UploadedFile
from tests.support.properties import ANY_TEXT, JSON, a_call

FIELDS = st.dictionaries(st.text(), st.lists(st.text(), min_size=1, max_size=3), max_size=4)
PAIRS = st.lists(st.tuples(st.text("abc", min_size=1), st.text("xyz")), max_size=5)


def exactly(value: Any) -> object:
    """The value such that 1, True and 1.0 differ, as do 0.0 and -0.0; dict order does not count."""
    if isinstance(value, dict):
        return frozenset((name, exactly(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(map(exactly, value))
    return type(value), repr(value)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with the keys of each object in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(item, rng)) for name, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def of(body: Any, **changes: Any) -> bytes:
    """The fingerprint of a whole request with this body."""
    return whole_request(a_call(body, **changes))


def a_file(**changes: Any) -> UploadedFile:
    given: dict[str, Any] = {"field": "photo", "name": "a.png", "media_type": "image/png"}
    return UploadedFile(**(given | {"size": 3, "sha256": "0" * 64} | changes))


# JSON.


@given(JSON, st.randoms(use_true_random=False), st.sampled_from([None, 0, 2]), st.booleans())
def test_json_written_differently_is_the_same(
    value: Any, rng: random.Random, indent: int | None, ascii_only: bool
) -> None:
    """The order of keys, the spacing, the escapes and the encoding make no difference."""
    again = json.dumps(shuffled(value, rng), indent=indent, ensure_ascii=ascii_only)
    one = of(json.dumps(value).encode())
    assert one == of(again.encode())
    assert one == of(again.encode("utf-16"))


@given(JSON, JSON)
@example(1, "1")
@example(1, 1.0)
@example(1, True)
@example(0, False)
@example("true", True)
@example("null", None)
@example(1.0, "1.0")
@example(0.0, -0.0)
@example({"a": None}, {})
@example([], {})
@example([[1], 2], [[1, 2]])
@example({"a": {"b": 1}}, {"a.b": 1})
@example(1.5, {"\0Decimal": "1.5"})
@example({"a": 1.5}, {"a": {"\0Decimal": "1.5"}})
def test_any_other_value_is_another_request(one: Any, other: Any) -> None:
    """A change of any value or of its type is another request, parsed here or by the adapter."""
    same = exactly(one) == exactly(other)
    assert (of(json.dumps(one).encode()) == of(json.dumps(other).encode())) == same
    assert (of(Parsed(one)) == of(Parsed(other))) == same


def test_digits_that_a_float_cannot_hold_count() -> None:
    """Amounts are compared as they are written, not as the nearest binary number."""
    assert of(b'{"amount": 0.1}') != of(b'{"amount": 0.1000000000000000055}')


@pytest.mark.parametrize("media_type", ["application/json", "application/merge-patch+json"])
def test_json_by_media_type(media_type: str) -> None:
    """JSON is recognised by its own media type and by those built on it."""
    assert of(b'{"a":1}', media_type=media_type) == of(b'{ "a": 1 }', media_type=media_type)


@given(st.binary(max_size=20), st.sampled_from(["application/json", "text/plain", ""]))
@example(b"\xff\xfe", "application/json")
@example(b'"\\ud800"', "application/json")
@example(b"\xed\xa0\x80", "application/json")
@example(b"NaN", "application/json")
@example(b"1e999999999", "application/json")
@example(b"1e99999999999999999999", "application/json")
@example(b"-0e-99999999999999999999", "application/json")
@example(b"9" * 10_000, "application/json")
def test_bytes_never_raise(body: bytes, media_type: str) -> None:
    """A client can send anything: it has a fingerprint, and the same one again."""
    assert of(body, media_type=media_type) == of(body, media_type=media_type)


@pytest.mark.parametrize("pair", [b"[]", b'{"a":}'])
@pytest.mark.parametrize("inner", [b"1", b"1.5"])
def test_depth_never_raises(pair: bytes, inner: bytes) -> None:
    """JSON nested to any depth has a fingerprint, just below what Python can walk too."""
    start, end = pair[:-1], pair[-1:]
    for depth in [*range(850, 1050), 100_000]:
        assert of(start * depth + inner + end * depth)


def test_parsed_body_that_is_large() -> None:
    """A number may have any number of digits: Python writes no integers of more than 4300."""
    assert of(Parsed({"a": 16**5000})) != of(Parsed({"a": 16**5000 + 1}))


@given(st.binary(), st.binary())
def test_anything_else_counts_byte_for_byte(one: bytes, other: bytes) -> None:
    """A body of any other media type is compared by its bytes; so is JSON that does not parse."""
    for media_type in ("text/csv", ""):
        same = of(one, media_type=media_type) == of(other, media_type=media_type)
        assert same == (one == other)
    broken = [b"{" + body for body in (one, other)]
    assert (of(broken[0]) == of(broken[1])) == (one == other) or one.strip().startswith(b'"')


def test_kinds_of_bodies_never_equal() -> None:
    """Bytes, a form and JSON differ, even where one is made to look like the other."""
    raw = of(b"json{}", media_type="text/plain")
    assert len({raw, of(Parsed({})), of(Form({})), of(b""), of(Parsed("")), of(Parsed(None))}) == 6


# The rest of the request.


@pytest.mark.parametrize("name", ["method", "path", "query", "media_type", "body"])
def test_every_part_counts(name: str) -> None:
    """A request that differs in one part only is another request."""
    changed = {"query": "a=1", "body": b"{}"}.get(name, "other")
    assert whole_request(a_call()) != whole_request(a_call(**{name: changed}))


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT, st.binary())
@example("a=%ff&b=\udcff", "\0", "\ud800", b"")
@example("&&=&;a", "/", "", b"")
def test_any_request_has_a_fingerprint(query: str, path: str, method: str, body: bytes) -> None:
    """Nothing in the request line raises: no NUL, no surrogate, no broken percent sign."""
    assert of(body, query=query, path=path, method=method)


@given(PAIRS, st.randoms(use_true_random=False))
def test_order_of_query_parameters(pairs: list[tuple[str, str]], rng: random.Random) -> None:
    """The order of parameters makes no difference, as long as each keeps its values' order."""
    by_name: dict[str, list[str]] = {}
    for name, value in pairs:
        by_name.setdefault(name, []).append(f"{name}={value}")
    names = list(by_name)
    rng.shuffle(names)
    other = "&".join(part for name in names for part in by_name[name])
    assert of(b"", query="&".join(f"{n}={v}" for n, v in pairs)) == of(b"", query=other)


@given(PAIRS, PAIRS)
@example([("a", "1"), ("a", "2")], [("a", "2"), ("a", "1")])
@example([("a", "")], [])
@example([("a", "1"), ("b", "2")], [("a", "2"), ("b", "1")])
def test_other_query(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    """Other values of a parameter, or the same ones in another order, are another request.

    Django's ``request.GET["a"]`` is the last value: their order decides what is done.
    """

    def by_name(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
        return {name: [v for n, v in pairs if n == name] for name, _ in pairs}

    queries = ["&".join(f"{name}={value}" for name, value in pairs) for pairs in (one, other)]
    same = by_name(one) == by_name(other)
    assert (of(b"", query=queries[0]) == of(b"", query=queries[1])) == same


@given(st.lists(st.binary() | st.text()), st.lists(st.binary() | st.text()))
@example(["a", "b"], ["ab"])
@example(["1:a"], ["a"])
@example(["", ""], [""])
@example(["a1:b"], ["a", "b"])
def test_framing_has_no_collisions(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Parts are told apart by their length: no two lists of parts have one digest."""

    def as_bytes(parts: Sequence[Any]) -> list[bytes]:
        return [part.encode() if isinstance(part, str) else part for part in parts]

    assert (digest(*one) == digest(*other)) == (as_bytes(one) == as_bytes(other))


# Forms.


@given(FIELDS, st.randoms(use_true_random=False))
def test_order_of_form_fields(form: dict[str, list[str]], rng: random.Random) -> None:
    """A form is compared by field: their order makes no difference."""
    assert of(Form(form)) == of(Form(shuffled(form, rng)))


@pytest.mark.parametrize("name", ["field", "name", "media_type", "size", "sha256"])
def test_files_count_by_what_identifies_them(name: str) -> None:
    """Another field, name, media type or content of a file is another request."""
    other = a_file(**{name: 4 if name == "size" else "other"})
    assert of(Form({}, (a_file(),))) != of(Form({}, (other,)))


def test_text_is_no_file() -> None:
    """A form's texts cannot be made to look like a file."""
    file = a_file()
    text = [file.name, file.media_type, str(file.size), file.sha256]
    assert of(Form({"photo": text})) != of(Form({}, (file,)))


# Some fields only.

BODY = {"card": {"number": "4242", "cvc": "1"}, "amount": 5, "sent_at": "10:00"}
FORM = Form({"card.number": ["4242"], "amount": ["5"], "sent_at": ["10:00"]}, (a_file(),))


def differs(fingerprint: Any, one: Any, other: Any) -> bool:
    """Whether the fingerprint tells the two bodies apart."""
    return bool(fingerprint(a_call(one)) != fingerprint(a_call(other)))


@pytest.mark.parametrize(
    ("included", "excluded", "path", "expected"),
    [
        (["card.number"], [], "card.number", True),
        (["card.number"], [], "card.cvc", False),
        ([], ["card.cvc"], "card.cvc", False),
        ([], ["card.cvc"], "card.number", True),
        (["card"], ["card.cvc"], "card.cvc", False),
        (["card"], ["card.cvc"], "card.number", True),
        (["card"], ["card.cvc"], "amount", False),
        # The whole of a field and a part of it: the whole.
        (["card", "card.number"], [], "card.cvc", True),
        (["card.number", "card"], [], "card.cvc", True),
        ([], ["card", "card.number"], "card.cvc", False),
        # A path into what is no object, and a field that is not there.
        (["amount.currency"], [], "amount", True),
        ([], ["amount.currency"], "amount", True),
        ([], ["nothing"], "amount", True),
    ],
)
def test_chosen_fields_of_json(
    included: list[str], excluded: list[str], path: str, expected: bool
) -> None:
    """Only a change of a field that matters is another request; nested fields are paths."""
    changed = copy.deepcopy(BODY)
    *parents, last = path.split(".")
    place: Any = changed
    for name in parents:
        place = place[name]
    place[last] = "changed"
    fingerprint = fields(include=included, exclude=excluded)
    assert differs(fingerprint, Parsed(BODY), Parsed(changed)) is expected
    as_bytes = [json.dumps(body).encode() for body in (BODY, changed)]
    assert differs(fingerprint, *as_bytes) is expected


@pytest.mark.parametrize(
    ("included", "excluded", "name", "expected"),
    [
        ([], ["sent_at"], "amount", True),
        (["card.number"], [], "card.number", True),
        ([], ["card.number"], "card.number", False),
        (["card.number"], [], "amount", False),
    ],
)
def test_chosen_fields_of_a_form(
    included: list[str], excluded: list[str], name: str, expected: bool
) -> None:
    """A form is flat: a field's name is taken as it is, dots included, as field_value() does."""
    changed = Form({**FORM.fields, name: ["changed"]}, FORM.files)
    assert differs(fields(include=included, exclude=excluded), FORM, changed) is expected


@pytest.mark.parametrize("mistake", [{"include": "card"}, {"exclude": "card"}])
def test_one_text_is_not_a_list_of_names(mistake: dict[str, str]) -> None:
    """``include="card"`` would mean the fields c, a, r and d, and so all requests the same."""
    with pytest.raises(TypeError, match="card"):
        fields(**mistake)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", Parsed([1]), Parsed("a")])
def test_body_without_fields_counts_as_a_whole(body: Any) -> None:
    """Where there are no fields to choose, everything counts."""
    assert fields(include=["a"])(a_call(body)) == whole_request(a_call(body))


def test_the_rest_of_the_request_counts_as_ever() -> None:
    """Choosing fields of the body does not leave out the path and the query."""
    fingerprint = fields(include=["a"])
    assert fingerprint(a_call(b"{}")) != fingerprint(a_call(b"{}", query="a=1"))
    assert fingerprint(a_call(b"{}")) != fingerprint(a_call(b"{}", path="/other/"))


# The value of one field.


@pytest.mark.parametrize(
    ("body", "path", "expected"),
    [
        (b'{"a": {"b": 1}}', "a.b", 1),
        (Parsed({"a": {"b": 1}}), "a", {"b": 1}),
        (Parsed({"a": 1}), "a.b", None),
        (Parsed([1]), "a", None),
        (b"not JSON", "a", None),
        (b"", "a", None),
        (Form({"a": ["1", "2"]}), "a", "2"),
        (Form({"a.b": ["1"]}), "a.b", "1"),
        (Form({"a": []}), "a", None),
        (Form({}), "a", None),
    ],
)
def test_field_value(body: Any, path: str, expected: Any) -> None:
    """One field's value, nested in JSON or of a form; None where it is absent."""
    assert field_value(a_call(body), path) == expected
