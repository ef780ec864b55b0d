"""Scopes: who calls and which operation, as text that every database keeps apart."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from idempotency_django.policy import scopes
from tests.support.properties import ANY_TEXT, a_call

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
