"""What is wrong with a policy, wherever it was declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from django.core.checks import (
    CheckMessage,
    Error,  # Django's name
)
from django.core.exceptions import ImproperlyConfigured

from ..conf import default_store, did_you_mean
from ..http.status import status_url
from ..planning import lease_of
from ..policy import UNSET, Policy
from ..stores import stores

PROJECT: Final = "IDEMPOTENCY['POLICY']"

NAMED: Final = 3
"""How many policies or routes one message names; the others are counted."""

_PROMISES: Final = ("idempotency_django.E019", "idempotency_django.E020")


def check_policy(policy: Any, where: str) -> Iterator[CheckMessage]:
    if policy is None:
        return
    if not isinstance(policy, Policy):
        yield Error(
            f"{where} is a {type(policy).__name__}; it must be a Policy or None.",
            id="idempotency_django.E002",
        )
        return
    if policy.store is not UNSET:
        yield from unknown_store(policy.store, where)
    yield from promise(policy, where)


def promise(policy: Policy, where: str) -> Iterator[CheckMessage]:
    """What the policy needs and nothing can promise; the hint names the policy."""
    try:
        resolved = policy.resolved()
        store = stores[resolved.store]
    except ImproperlyConfigured:
        return  # another check reports it
    try:
        lease_of(resolved, store)
    except ImproperlyConfigured as error:
        yield Error(str(error), hint=where, id="idempotency_django.E019")
    if resolved.on_conflict == "accepted":
        try:
            status_url("token")
        except ImproperlyConfigured as error:
            yield Error(str(error), hint=where, id="idempotency_django.E020")


def each_once(messages: Iterable[CheckMessage]) -> Sequence[CheckMessage]:
    """The messages, with one for all policies that share a promise that cannot be kept."""
    places: dict[str, list[str]] = {}
    merged: list[CheckMessage] = []
    for message in messages:
        if message.id in _PROMISES:
            places.setdefault(message.msg, []).append(str(message.hint))
        if message.id not in _PROMISES or len(places[message.msg]) == 1:
            merged.append(message)
    for message in merged:
        if message.id in _PROMISES:
            message.hint = f"Found in {_listed(places[message.msg])}."
    return merged


def _listed(places: list[str]) -> str:
    more = len(places) - NAMED
    named = ", ".join(places[:NAMED])
    if more > 0:
        named += f" and {more} more {'policies' if more > 1 else 'policy'}"
    return named


def known_stores() -> list[str]:
    """The aliases of the stores; none if ``check_settings`` reports what is wrong with them."""
    try:
        return list(stores)
    except ImproperlyConfigured:
        return []


def unknown_store(alias: str, where: str) -> Iterator[CheckMessage]:
    aliases = known_stores()
    if not aliases or alias in aliases:
        return
    if alias == default_store():
        yield Error(
            f"IDEMPOTENCY['STORES'] has {', '.join(map(repr, aliases))}, but no {alias!r}, so "
            f"{where} has no store.",
            hint=(
                f"Choose one with 'POLICY': {{'store': {aliases[0]!r}}} in IDEMPOTENCY, or name "
                "one of them 'default'."
            ),
            id="idempotency_django.E003",
        )
    else:
        yield Error(
            f"{where} names the store {alias!r}, which is not in IDEMPOTENCY['STORES'].",
            hint=did_you_mean(alias, aliases),
            id="idempotency_django.E003",
        )
