"""Checks of the settings, the stores and the order of the middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import django
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured

from ..conf import MIDDLEWARE, default_store, did_you_mean
from ..contrib.messaging.conf import conf  # of all names in IDEMPOTENCY
from ..engine.planning import choose_mode
from ..http.status import status_url
from ..policy import UNSET, Policy
from ..stores import stores

PROJECT: Final = "IDEMPOTENCY['POLICY']"

_NAMED: Final = 3
"""The most policies or routes that one message names; the others are counted."""

_T = TypeVar("_T")

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
    """The requirement of the policy that nothing can meet; the hint names the policy."""
    resolved, _ = tried(policy.resolved)
    store, _ = tried(lambda: stores[resolved.store]) if resolved else (None, "")
    if resolved is None or store is None:
        return  # another check reports it
    needs: dict[str, Callable[[], object]] = {"E019": partial(choose_mode, resolved, store)}
    if resolved.on_conflict == "accepted":
        needs["E020"] = partial(status_url, "token")
    for number, need in needs.items():
        _, error = tried(need)
        if error:
            yield Error(error, hint=where, id=f"idempotency_django.{number}")


def tried(read: Callable[[], _T]) -> tuple[_T | None, str]:
    """The result of reading or, if the configuration is wrong, ``None`` and the error's text."""
    try:
        return read(), ""
    except ImproperlyConfigured as error:
        return None, str(error)


def each_once(messages: Iterable[CheckMessage]) -> Sequence[CheckMessage]:
    """The messages, with one for all policies that share a promise that cannot be kept."""
    places: dict[str, list[str]] = {}
    merged: list[CheckMessage] = []
    for message in messages:
        shared = message.id in _PROMISES
        if not (shared and message.msg in places):
            merged.append(message)
        if shared:
            places.setdefault(message.msg, []).append(str(message.hint))
    for message in merged:
        if message.id in _PROMISES:
            message.hint = f"Found in {listed(places[message.msg], 'policy', 'policies')}."
    return merged


def listed(names: Sequence[str], one: str, many: str) -> str:
    """The first names, and how many others there are."""
    more = len(names) - _NAMED
    others = f" and {more} more {many if more > 1 else one}" if more > 0 else ""
    return ", ".join(names[:_NAMED]) + others


def known_stores() -> list[str]:
    """The aliases of the stores; none if ``check_settings`` reports what is wrong with them."""
    return tried(lambda: list(stores))[0] or []


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


NEWEST_DJANGO: Final = (6, 1)
"""The newest that the tests run on; no upper bound keeps a project from a later one."""


def check_django(**_: Any) -> Iterator[CheckMessage]:
    """Whether the tests of this version ran on this Django."""
    if django.VERSION[:2] > NEWEST_DJANGO:
        newest = "{}.{}".format(*NEWEST_DJANGO)
        yield Warning(
            f"This version of idempotency_django was tested with Django up to {newest}, and this "
            f"is {django.get_version()}.",
            hint="Upgrade idempotency_django, or run your tests and silence this warning.",
            id="idempotency_django.W072",
        )


def check_settings(**_: Any) -> Sequence[CheckMessage]:
    """The names and values in ``IDEMPOTENCY``."""
    names, error = tried(lambda: conf.raw)
    if names is None:
        return [Error(error, id="idempotency_django.E002")]
    known = conf.names()
    unknown: list[CheckMessage] = [
        Error(
            f"IDEMPOTENCY has no setting {name!r}.",
            hint=did_you_mean(str(name), known),
            id="idempotency_django.E001",
        )
        for name in names
        if name not in known
    ]
    readers: list[Callable[[], object]] = [
        *(partial(getattr, conf, name.lower()) for name in sorted(known)),
        Policy().resolved,
    ]
    errors = [error for _, error in map(tried, readers) if error]
    wrong = [Error(error, id="idempotency_django.E002") for error in errors]
    return [*unknown, *wrong, *_misnamed()]


def _misnamed() -> Iterator[CheckMessage]:
    """Settings with names of ours, where the dict of ours is missing: none of them is read."""
    if hasattr(settings, "IDEMPOTENCY"):
        return
    for name in sorted(conf.names()):
        if hasattr(settings, f"IDEMPOTENCY_{name}"):
            yield Error(
                f"The setting IDEMPOTENCY_{name} has no effect: the settings of idempotency_django "
                "are a dict named IDEMPOTENCY.",
                hint=f"Write IDEMPOTENCY = {{{name!r}: …}}.",
                id="idempotency_django.E038",
            )


def check_stores(**_: Any) -> Sequence[CheckMessage]:
    """Whether every store can be made, and what each reports about its configuration."""
    messages: list[CheckMessage] = []
    for alias in known_stores():
        try:
            messages += stores[alias].check()
        except ImproperlyConfigured as error:
            messages.append(Error(str(error), id="idempotency_django.E003"))
    policy, _error = tried(Policy().resolved)
    return [*messages, *(unknown_store(policy.store, PROJECT) if policy else ())]


def check_live_stores(
    *, databases: Sequence[str] | None = None, **_: Any
) -> Sequence[CheckMessage]:
    """Ask the stores themselves, where their database may be asked (``check --database``)."""
    found = [tried(partial(stores.__getitem__, alias))[0] for alias in known_stores()]
    return [
        message
        for store in found
        if store and store.using in (databases or ())  # else check_stores reports it
        for message in store.check_live()
    ]


def check_middleware(**_: Any) -> Iterator[CheckMessage]:
    """The place of :class:`~idempotency_django.middleware.IdempotencyMiddleware`."""
    paths = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in paths:
        return
    if paths[-1] != MIDDLEWARE:
        yield Error(
            f"{MIDDLEWARE} is not the last in MIDDLEWARE, so it does not start.",
            hint="Move it to the end of MIDDLEWARE, so that the checks of all others come before.",
            id="idempotency_django.E009",
        )
