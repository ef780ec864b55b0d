"""Policies: where a field's value comes from, what it can hold, and what follows from it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from idempotency_django.engine.planning import choose_mode
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
)
from idempotency_django.policy.digests import keyed_digests
from idempotency_django.policy.fingerprints import fields, whole_request
from idempotency_django.policy.invocation import Parsed
from idempotency_django.stores import stores
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim
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


class Validated(MemoryStore):
    """A store that counts the policies that it is asked about."""

    validated = 0

    def validate(self, policy: Any) -> None:
        self.validated += 1
        super().validate(policy)


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


@pairs(REFUSED)
def test_wrong_value_in_the_setting(name: str, value: Any) -> None:
    """The same in IDEMPOTENCY["POLICY"]."""
    with (
        override_settings(IDEMPOTENCY={"POLICY": {name: value}}),
        pytest.raises(ImproperlyConfigured, match=f"has {name}="),
    ):
        Policy().resolved()


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


def test_required_says_all_that_it_can_be() -> None:
    """The text names both kinds of value."""
    with pytest.raises(ImproperlyConfigured) as caught:
        Policy(required=1)  # type: ignore[arg-type]
    assert "True" in str(caught.value)
    assert "POST" in str(caught.value)


def test_unknown_field() -> None:
    """A field that is not there is refused by Python itself."""
    with pytest.raises(TypeError, match="requierd"):
        Policy(requierd=True)  # type: ignore[call-arg]


# A policy never changes.


@pytest.mark.parametrize("name", NAMES)
def test_fields_cannot_be_set(name: str) -> None:
    """A policy may be shared, because nobody can change it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Policy(), name, getattr(DEFAULTS, name))


@pytest.mark.parametrize("name", NAMES)
def test_values_cannot_change(name: str) -> None:
    """Nor can what its fields hold: the defaults would change for every view."""
    value = getattr(DEFAULTS, name)
    assert not hasattr(value, "__setitem__")
    assert not hasattr(value, "add")


def test_changing_what_was_given() -> None:
    """A policy keeps its value when the object that it was made of changes."""
    given = {"POST"}
    policy = Policy(required=given)  # type: ignore[arg-type]
    given.clear()
    assert policy.required == {"POST"}


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_copy(clone: Callable[[Policy], Policy]) -> None:
    """A copy leaves out what the policy leaves out."""
    policy = clone(Policy(ttl=DAY))
    assert given_fields(policy) == {"ttl": DAY}
    assert policy.resolved().ttl == DAY


def test_pickle() -> None:
    """So does a policy that went to another process."""
    assert given_fields(pickle.loads(pickle.dumps(Policy(ttl=DAY)))) == {"ttl": DAY}


def test_representation() -> None:
    """A policy's representation shows what it sets itself, in the order of the fields."""
    assert repr(Policy()) == "Policy()"
    assert repr(Policy(ttl=None, required=True)) == "Policy(required=True, ttl=None)"


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


def test_resolved_is_whole_and_made_once() -> None:
    """A resolved policy has every field; asking again costs nothing."""
    policy = Policy(required=True)
    assert set(given_fields(policy.resolved())) == set(NAMES)
    assert policy.resolved() is policy.resolved()
    assert policy.resolved().resolved().required is True


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


@pytest.mark.parametrize("setting", [None, "PAYMENT", [], 1])
def test_project_policy_of_another_kind(setting: Any) -> None:
    """IDEMPOTENCY["POLICY"] is a dict or a Policy."""
    with (
        override_settings(IDEMPOTENCY={"POLICY": setting}),
        pytest.raises(ImproperlyConfigured, match=f"not {type(setting).__name__}"),
    ):
        Policy().resolved()


@pytest.mark.parametrize(
    ("setting", "named", "offered"),
    [
        ({"requierd": True}, "'requierd'", "'required'"),
        ({1: 2, "tll": 3}, "'tll'", "'ttl'"),
        ({1: 2, "tll": 3}, "field 1", "on_replay"),
    ],
)
def test_project_policy_with_unknown_fields(setting: Any, named: str, offered: str) -> None:
    """A field that does not exist is named, with the one that was meant or with all of them."""
    with (
        override_settings(IDEMPOTENCY={"POLICY": setting}),
        pytest.raises(ImproperlyConfigured) as caught,
    ):
        Policy().resolved()
    assert named in str(caught.value)
    assert offered in str(caught.value)


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


def test_client_key() -> None:
    """The header's key counts in both forms."""
    policy = Policy().resolved()
    assert identity.client_key(policy, '"abc"') == identity.client_key(policy, "abc") == "abc"
    derived = Policy(key=keys.instead_of_header(keys.natural("order"))).resolved()
    assert identity.key_of_request(derived, a_call(Parsed({"order": "A-1"}))) == "A-1"
    with pytest.raises(KeyMalformed):
        identity.client_key(policy, "")


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


def test_operation() -> None:
    """What the engine is told of a call."""
    policy = Policy(ttl=DAY, retention=timedelta(hours=2)).resolved()
    call = a_call(b"{}", query="a=1")
    operation = identity.operation(policy, call, key="k")
    assert operation.key == "k"
    assert operation.scope == "user:42|POST /orders/"
    assert operation.name == "POST /orders/"
    parts = (whole_request(call), operation.scope, "k", "", "user:42", "")
    assert operation.fingerprints == keyed_digests("fingerprint", *parts)
    assert (operation.ttl, operation.retention) == (DAY, timedelta(hours=2))
    assert operation.extend_on_replay is False
    assert (operation.principal, operation.method, operation.path) == (
        "user:42",
        "POST",
        "/orders/",
    )


def test_claim_names_its_operation() -> None:
    """``request.idempotency`` tells the view its key and scope."""
    claim = Claim(identity.operation(Policy().resolved(), a_call(), key="k"), 1, "token")
    assert (claim.key, claim.scope) == ("k", "user:42|POST /orders/")


def test_extended_by_a_replay() -> None:
    """The time to live counts from the first execution or from the last replay."""
    policy = Policy(extend_on_replay=True).resolved()
    assert identity.operation(policy, a_call(), key="k").extend_on_replay is True


def test_operation_of_ones_own_name() -> None:
    """A name of your own keeps keys alive when the route changes."""
    policy = Policy(operation="charge").resolved()
    operations = [identity.operation(policy, a_call(name=name), key="k") for name in ("a", "b")]
    assert operations[0] == operations[1]
    assert (operations[0].name, operations[0].scope) == ("charge", "user:42|charge")


@given(ANY_TEXT.filter(bool))
def test_scope_of_a_callable_is_fitted(scope: str) -> None:
    """Whatever text a scope callable or an adapter gives, stores get one that they can keep."""
    policy = Policy(scope=lambda call: scope).resolved()
    assert identity.operation(policy, a_call(), key="k").scope == scopes.fit(scope)
    assert identity.operation(
        Policy().resolved(), a_call(), key="k", scope=scope
    ).scope == scopes.fit(scope)


def test_bind_principal() -> None:
    """In a shared scope a key replays to its first principal only, unless the policy says so."""
    alice, bob = a_call(principal="user:1"), a_call(principal="user:2")

    def same(policy: Policy) -> bool:
        one, other = (identity.operation(policy, call, key="k") for call in (alice, bob))
        assert one.scope == other.scope
        return one.fingerprint == other.fingerprint

    assert not same(Policy(scope=scopes.shared).resolved())
    assert same(Policy(scope=scopes.shared, principal=False).resolved())


@given(ANY_TEXT, st.binary(), ANY_TEXT, st.binary())
def test_principal_and_request_do_not_run_together(
    one: str, asked: bytes, other: str, asked_otherwise: bytes
) -> None:
    """The fingerprint is of the principal and the request, with a border between them."""

    def fingerprint(principal: str, body: bytes) -> str:
        policy = Policy(fingerprint=lambda call: body).resolved()
        return identity.operation(policy, a_call(principal=principal), key=UUID).fingerprint

    same = fingerprint(one, asked) == fingerprint(other, asked_otherwise)
    assert same == ((one, asked) == (other, asked_otherwise))


def test_scope_of_an_anonymous_caller() -> None:
    """Callers who are not told apart share a scope."""
    anonymous, policy = a_call(principal=""), Policy().resolved()
    assert identity.operation(policy, anonymous, key=UUID).scope == "anonymous|POST /orders/"


# Policies as values.


def test_equal_by_value() -> None:
    """Policies with the same values are equal, and have the same hash."""
    one, other = (Policy(ttl=timedelta(days=1), required={"POST"}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != one.replace(ttl=timedelta(days=2))
    assert one != one.replace(extend_on_replay=True)
    assert one != "a policy"


def test_callable_without_a_hash() -> None:
    """A callable that cannot be hashed is equal to itself only."""

    class Scope:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, call: Any) -> str:
            return "scope"

    scope = Scope()
    assert Policy(scope=scope) == Policy(scope=scope)
    assert hash(Policy(scope=scope)) == hash(Policy(scope=scope))
    assert Policy(scope=scope) != Policy(scope=Scope())


def per_request(**fields: Any) -> Iterator[Policy]:
    """Policies as a project makes them for each request."""
    return (Policy(required=True, **fields) for _ in range(5000))


def test_policy_of_each_request(settings: Any) -> None:
    """What follows from a policy is worked out once for all policies with the same values."""
    settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": f"{__name__}.Validated"}}}
    store = stores["default"]
    assert isinstance(store, Validated)
    resolved = {id(policy.resolved()) for policy in per_request(ttl=DAY)}
    for policy in per_request(ttl=DAY):
        choose_mode(policy.resolved(), store)
    assert (len(resolved), store.validated) == (1, 1)


def test_lifetime_per_tenant(settings: Any) -> None:
    """A lifetime for each tenant is worked out once for each tenant, however many requests."""
    settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": f"{__name__}.Validated"}}}
    store = stores["default"]
    assert isinstance(store, Validated)
    for _ in range(10):
        for tenant in range(500):
            choose_mode(Policy(ttl=timedelta(days=tenant + 1)).resolved(), store)
    assert store.validated == 500


@pytest.mark.parametrize("name", ["wait_timeout", "requierd"])
def test_replace_unknown_field(name: str) -> None:
    """What the decorator and replace() do not know is refused, with the names that exist."""
    with pytest.raises(TypeError, match=f"no field '{name}'"):
        Policy().replace(**{name: True})
