"""Policies: where a field's value comes from, and what it can hold; keys and scopes of calls."""

from __future__ import annotations

import dataclasses
import pickle
import re
from datetime import timedelta
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import override_settings
from hypothesis import assume, example, given
from hypothesis import strategies as st

from idempotency_django.errors import KeyMalformed, KeyMissing
from idempotency_django.policy import (
    DEFAULTS,
    FIELDS,
    PAYMENT,
    UNSAFE_METHODS,
    UNSET,
    Policy,
    PolicyFields,
    identity,
    keys,
    scopes,
    store_only,
)
from idempotency_django.policy.fingerprints import fields, whole_request
from idempotency_django.policy.invocation import Parsed
from tests.support.properties import ANY_TEXT, a_call

NAMES = [*FIELDS]
UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"
DAY = timedelta(days=1)


def any_rebuild(record: Any, request: Any) -> None:
    """Stands for a function of a project's."""


async def a_coroutine(request: Any, record: Any) -> None:
    """Would refuse too late."""


class AsyncCallable:
    async def __call__(self, request: Any, record: Any) -> None:
        """Likewise."""


def any_should_store(request: Any, response: Any) -> bool:
    """Stands for a function of a project's."""
    return True


ACCEPTED: dict[str, list[Any]] = {
    "store": ["default", "audit"],
    "required": [True, False, {"PUT"}, ["post", "delete"], frozenset()],
    "key": [None, keys.generated],
    "key_format": ["any", "uuid", "ulid", "opaque", r"ord-\d+"],
    "scope": [scopes.per_user, scopes.shared],
    "principal": [None, False, keys.generated],
    "operation": [None, "charge"],
    "fingerprint": [whole_request, fields(include=["a"])],
    "ttl": [None, DAY, timedelta(microseconds=1), 7 * DAY],
    "extend_on_replay": [True, False],
    "on_expired": ["execute", "refuse"],
    "retention": [timedelta(0), DAY],
    "mode": ["auto", "transactional", "leased"],
    "lease": [timedelta(seconds=1), DAY],
    "max_duration": [None, timedelta(seconds=1), 100 * DAY],
    "on_interrupted": ["resume", "hold"],
    "on_conflict": ["reject", "wait", "accepted", timedelta(0), DAY],
    "should_store": [None, any_should_store],
    "max_response_bytes": [0, 10**9],
    "rebuild": [None, any_rebuild],
    "check_replay": [None, any_rebuild],
    "on_replay": [None, any_should_store],
}
NO_CALLABLES = ["idempotency_django.policy.keys.generated", 1, []]
NO_DURATIONS = [60, 1.5, "1 day", None, timedelta(microseconds=-1)]
REFUSED: dict[str, list[Any]] = {
    "store": ["", None, 1, b"default"],
    "required": [None, 1, "POST", {"GET"}, {1}, [["POST"]]],
    "key": NO_CALLABLES,
    "key_format": ["", None, 1, "[", "(", "a{99999999999999999999}", "UUID"],
    "scope": [*NO_CALLABLES, None],
    "principal": [*NO_CALLABLES, True, 0],
    "operation": ["", 1, b"charge"],
    "fingerprint": [*NO_CALLABLES, None],
    "ttl": [60, "1 day", timedelta(0), -DAY, timedelta.max],
    "extend_on_replay": [None, 1, "yes"],
    "on_expired": [None, "", "hold", True],
    "retention": [*NO_DURATIONS, timedelta.max],
    "mode": [None, "", "lease", True],
    "lease": [*NO_DURATIONS, timedelta(0), DAY + timedelta(seconds=1)],
    "max_duration": [*(each for each in NO_DURATIONS if each is not None), timedelta(0)],
    "on_interrupted": [None, "", "fail", True],
    "on_conflict": [None, "", "raise", True, 60, 1.5, timedelta(microseconds=-1)],
    "should_store": [*NO_CALLABLES, a_coroutine, AsyncCallable()],
    "max_response_bytes": [None, -1, 1.5, "1", True, timedelta(1)],
    "rebuild": NO_CALLABLES,
    "check_replay": [*NO_CALLABLES, a_coroutine, AsyncCallable()],
    "on_replay": [*NO_CALLABLES, a_coroutine, AsyncCallable()],
}


def pairs(table: dict[str, list[Any]]) -> Any:
    """Parameters, one for each field and value."""
    return pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in table.items() for value in values]
    )


def given_fields(policy: Policy) -> dict[str, Any]:
    """The fields that a policy sets itself."""
    values = {name: getattr(policy, name) for name in NAMES}
    return {name: value for name, value in values.items() if value is not UNSET}


# What the fields can hold.


def test_every_field_is_tested() -> None:
    """A new field needs its values here and a default."""
    assert set(NAMES) == set(ACCEPTED) == set(REFUSED) == set(given_fields(DEFAULTS))


@pairs(ACCEPTED)
def test_right_value(name: str, value: Any) -> None:
    """A value that the field can hold is kept, and no other field is set by it."""
    policy = Policy(**{name: value})
    kept = getattr(policy, name)
    if name == "required" and not isinstance(value, bool):
        assert kept == {method.upper() for method in value}
    else:
        assert kept == (set(value) if isinstance(kept, frozenset) else value)
    assert set(given_fields(policy)) == {name}


@pairs(REFUSED)
def test_wrong_value(name: str, value: Any) -> None:
    """A value that the field cannot hold is refused where it is written, by the field's name."""
    with pytest.raises(ImproperlyConfigured) as caught:
        Policy(**{name: value})
    assert f"{name}={value!r}; it must be " in str(caught.value)


@given(st.sampled_from(NAMES), st.one_of(st.none(), st.integers(), ANY_TEXT, st.binary()))
def test_any_value_is_kept_or_refused(name: str, value: Any) -> None:
    """No value raises anything but ImproperlyConfigured."""
    try:
        Policy(**{name: value})
    except ImproperlyConfigured as error:
        refusal = str(error)
    else:
        return
    assert name in refusal


# A policy never changes.


@pytest.mark.parametrize("name", NAMES)
def test_fields_cannot_be_set(name: str) -> None:
    """A policy may be shared, because nobody can change it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Policy(), name, getattr(DEFAULTS, name))


def test_changing_what_was_given() -> None:
    """A policy keeps its value when the object that it was made of changes."""
    given = {"POST"}
    policy = Policy(required=given)  # type: ignore[arg-type]
    given.clear()
    assert policy.required == {"POST"}


def test_pickle() -> None:
    """So does a policy that went to another process."""
    assert given_fields(pickle.loads(pickle.dumps(Policy(ttl=DAY)))) == {"ttl": DAY}


def test_options_for_type_checkers() -> None:
    """What replace() and the decorator take has the names and types of the fields."""
    declared = {field.name: field.type for field in FIELDS.values()}
    annotated = {name: each.__forward_arg__ for name, each in PolicyFields.__annotations__.items()}
    assert annotated == declared


# Where a value comes from.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("as_policy", [True, False])
def test_inheritance(name: str, as_policy: bool) -> None:
    """A field is the view's, else the project's, else the default; the setting counts at once."""
    project, view = ACCEPTED[name][0], ACCEPTED[name][-1]
    setting = Policy(**{name: project}) if as_policy else {name: project}
    policy, silent = Policy(**{name: view}), Policy()
    for _ in range(2):
        assert getattr(silent.resolved(), name) == getattr(DEFAULTS, name)
        with override_settings(IDEMPOTENCY={"POLICY": setting}):
            assert getattr(silent.resolved(), name) == getattr(Policy(**{name: project}), name)
            assert getattr(policy.resolved(), name) == getattr(policy, name)
    assert getattr(policy.resolved(), name) == getattr(policy, name)


def test_none_is_a_value() -> None:
    """A view's None is not "left out": it switches off what the project has set."""
    with override_settings(IDEMPOTENCY={"POLICY": {"key": keys.generated, "ttl": DAY}}):
        resolved = Policy(key=None, ttl=None).resolved()
        assert (resolved.key, resolved.ttl) == (None, None)


def test_replace_and_over() -> None:
    """Policies are made of one another; neither of the two changes."""
    base, top = Policy(ttl=DAY, required=True), Policy(ttl=None)
    assert given_fields(top.over(base)) == {"ttl": None, "required": True}
    assert given_fields(base.replace(required=False)) == {"ttl": DAY, "required": False}
    assert given_fields(base) == {"ttl": DAY, "required": True}


def test_payment() -> None:
    """It sets what payments need; the rest is the project's."""
    payment = {"ttl": timedelta(days=30), "required": True, "mode": "leased"}
    assert given_fields(PAYMENT) == payment


# Which key.


@pytest.mark.parametrize(
    ("required", "refused"),
    [
        (False, set()),
        (True, {"POST", "PATCH"}),
        ({"put"}, {"PUT"}),
        (UNSAFE_METHODS, UNSAFE_METHODS),
    ],
)
def test_required(required: Any, refused: set[str]) -> None:
    """True requires a key where HTTP itself does not make a retry safe; a set says which."""
    policy = Policy(required=required).resolved()
    assert {method for method in UNSAFE_METHODS if policy.requires_key(method)} == refused
    for method in UNSAFE_METHODS - refused:
        identity.refuse_missing(policy, method)
    for method in refused:
        with pytest.raises(KeyMissing, match="requires the header Idempotency-Key"):
            identity.refuse_missing(policy, method)


@override_settings(IDEMPOTENCY={"HEADER": "X-Request-Key"})
def test_missing_key_names_the_header() -> None:
    """The text names the header that this project asks for, or the fields where none counts."""
    with pytest.raises(KeyMissing, match="X-Request-Key"):
        identity.refuse_missing(Policy(required=True).resolved(), "POST")
    derived = Policy(required=True, key=keys.instead_of_header(keys.natural("order"))).resolved()
    with pytest.raises(KeyMissing, match="fields of the request") as caught:
        identity.refuse_missing(derived, "POST")
    assert "X-Request-Key" not in str(caught.value)


@pytest.mark.parametrize(
    ("key_format", "key", "expected"),
    [("any", "1", True), ("uuid", UUID, True), ("uuid", "1", False), (r"ord-\d+", "ord-1", True)],
)
def test_key_format(key_format: str, key: str, expected: bool) -> None:
    """The format holds for the client's key and for a derived one; the refusal names it."""
    policy = Policy(key_format=key_format, key=lambda call: key).resolved()
    for read in (
        lambda: identity.client_key(policy, key),
        lambda: identity.key_of_request(policy, a_call()),
    ):
        if expected:
            assert read() == key
        else:
            with pytest.raises(KeyMalformed, match=key_format):
                read()


def test_derived_key() -> None:
    """A key callable gives the key, or None; what it gives must be one."""
    assert identity.key_of_request(Policy().resolved(), a_call()) is None
    policy = Policy(key=keys.natural("order")).resolved()
    assert identity.key_of_request(policy, a_call(Parsed({"order": "A-1"}))) == "A-1"
    assert identity.key_of_request(policy, a_call(Parsed({}))) is None
    with pytest.raises(KeyMalformed):
        identity.key_of_request(policy, a_call(Parsed({"order": "A 1"})))


@pytest.mark.parametrize("name", ["key", "scope", "fingerprint"])
@pytest.mark.parametrize("value", [42, ["a"], object()])
def test_callable_that_returns_something_else(name: str, value: object) -> None:
    """A project's callable that returns no text is named, with what it returned."""
    policy = Policy(**{name: lambda call: value}).resolved()

    def ask() -> None:
        identity.key_of_request(policy, a_call())
        identity.operation(policy, a_call(), key=UUID)

    with pytest.raises(ImproperlyConfigured, match=f"{name}.*{type(value).__name__}"):
        ask()


# Which operation.


def test_bind_principal() -> None:
    """In a shared scope a key replays to its first principal only, unless the policy says so."""
    alice, bob = a_call(principal="user:1"), a_call(principal="user:2")

    def same(policy: Policy) -> bool:
        one, other = (identity.operation(policy, call, key="k") for call in (alice, bob))
        assert one.scope == other.scope
        return one.fingerprint == other.fingerprint

    assert not same(Policy(scope=scopes.shared).resolved())
    assert same(Policy(scope=scopes.shared, principal=False).resolved())


# Policies as values.


@pytest.mark.parametrize("name", ["wait_timeout", "requierd"])
def test_replace_unknown_field(name: str) -> None:
    """What the decorator and replace() do not know is refused, with the names that exist."""
    with pytest.raises(TypeError, match=f"no field '{name}'"):
        Policy().replace(**{name: True})


# Which responses.


def test_equal_policies() -> None:
    """A policy that is made for each request is equal to the one before."""
    assert Policy(should_store=store_only(200)) == Policy(should_store=store_only(200))
    assert Policy(should_store=store_only(200)) != Policy(should_store=store_only(201))


@pytest.mark.parametrize("statuses", [(), (500,), (199,), (True,), ("200",), ((200, 201),)])
def test_statuses_that_cannot_be_stored(statuses: tuple[Any, ...]) -> None:
    """A list of nothing, and what is no status that can be stored, is refused where it is said."""
    with pytest.raises(ImproperlyConfigured, match="needs HTTP statuses from 200 to 499"):
        store_only(*statuses)


def test_status_of_an_enum() -> None:
    """A status may be a member of HTTPStatus."""
    wanted = store_only(HTTPStatus.CREATED)
    assert [wanted(None, HttpResponse(status=status)) for status in (200, 201)] == [False, True]


# Scopes: who calls and which operation, as text that every database keeps apart.


PARTS = st.lists(ANY_TEXT, min_size=1, max_size=4)
LONG = st.builds(lambda text, times: text * times, ANY_TEXT, st.integers(1, 300))
SCOPES = ANY_TEXT | LONG | LONG.map(scopes.fit)


@given(PARTS, PARTS)
@example(["a|b"], ["a", "b"])
@example(["a%7Cb"], ["a|b"])
@example(["a", ""], ["a"])
@example(["|", ""], ["", "|"])
def test_join_is_injective(one: list[str], other: list[str]) -> None:
    """Different parts never make the same scope, whatever characters they hold."""
    assert (scopes.join(*one) == scopes.join(*other)) == (one == other)


@given(SCOPES)
@example("\ud800")
@example("\0")
@example(" ")
@example("é" * 255)
def test_fit_is_what_every_database_keeps(scope: str) -> None:
    """A scope is at most 255 printable ASCII characters and does not end in a space."""
    assert re.fullmatch(r"([\x20-\x7e]{0,254}[\x21-\x7e])?", scopes.fit(scope))


@given(SCOPES, SCOPES)
@example("a ", "a%20")
@example("a ", "a")
@example("é", "e\N{COMBINING ACUTE ACCENT}")
@example("A", "a")
@example("a" * 300, "a" * 301)
@example("a" * 300, scopes.fit("a" * 300))
@example("\ud800", "?")
def test_fit_is_injective(one: str, other: str) -> None:
    """Different scopes stay different: among long ones, and from the fitted form of a long one."""
    assert (scopes.fit(one) == scopes.fit(other)) == (one == other)


def test_fit_leaves_the_usual_alone() -> None:
    """A scope that fits already is kept as it is, so that an operator can search for it."""
    usual = "user:42|POST /orders/<int:pk>/pay/"
    assert scopes.fit(usual) == usual
    assert scopes.fit("x" * 255) == "x" * 255
    assert re.fullmatch("x{190}#[0-9a-f]{64}", scopes.fit("x" * 256))


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_TEXT)
@example("user:1", "POST /a|b/", "user:1|POST /a", "b/")
def test_per_user(one: str, name: str, other: str, other_name: str) -> None:
    """Two users, or two operations, never share a scope."""
    assume(one and other)
    same = (one, name) == (other, other_name)
    first = scopes.per_user(a_call(principal=one, name=name))
    assert (first == scopes.per_user(a_call(principal=other, name=other_name))) == same


def test_anonymous_callers_share_a_scope() -> None:
    """Callers who are not told apart share a scope; no user has the same one."""
    assert scopes.per_user(a_call(principal="")) == "anonymous|POST /orders/"


@given(ANY_TEXT, ANY_TEXT)
def test_per_tenant(one: str, other: str) -> None:
    """Two tenants never share a scope, and the tenant is asked of the request."""
    scope_of = scopes.per_tenant(lambda request: request.tenant)
    calls = [a_call(request=SimpleNamespace(tenant=tenant)) for tenant in (one, other)]
    assert (scope_of(calls[0]) == scope_of(calls[1])) == (one == other)


def test_per_tenant_is_shared_by_its_users() -> None:
    """A key belongs to the whole tenant, but only for one operation."""
    scope_of = scopes.per_tenant(lambda request: request)
    alice, bob = a_call(request=7), a_call(request=7, principal="user:2")
    assert scope_of(alice) == scope_of(bob) == "tenant:7|POST /orders/"
    assert scope_of(alice) != scope_of(a_call(request=7, name="POST /refunds/"))


@pytest.mark.parametrize("call", [a_call(), a_call(principal=""), a_call(name="POST /refunds/")])
def test_shared(call: object) -> None:
    """One namespace for everybody and every operation."""
    assert scopes.shared(call) == "global"  # type: ignore[arg-type]
