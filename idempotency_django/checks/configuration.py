"""Checks of the settings, the stores and the policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import django
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured

from ..conf import did_you_mean
from ..contrib.messaging.conf import conf  # of all names in IDEMPOTENCY
from ..engine.planning import choose_mode
from ..http.status import status_url
from ..policy import Policy
from ..stores import stores

_T = TypeVar("_T")

NEWEST_DJANGO: Final = (6, 1)
"""The newest that the tests run on; no upper bound keeps a project from a later one."""


def tried(read: Callable[[], _T]) -> tuple[_T | None, str]:
    """The result of reading or, if the configuration is wrong, ``None`` and the error's text."""
    try:
        return read(), ""
    except ImproperlyConfigured as error:
        return None, str(error)


def check_policy(policy: Policy, where: str) -> Iterator[CheckMessage]:
    """Whether the store of the policy exists, and can keep what the policy promises."""
    resolved, _ = tried(policy.resolved)
    aliases, _ = tried(lambda: list(stores))
    if resolved is None or aliases is None:
        return  # check_settings reports it
    store, unusable = tried(lambda: stores[resolved.store])
    if store is None:
        if resolved.store not in aliases:  # else check_stores reports it
            yield Error(unusable, hint=f"See {where}.", id="idempotency_django.E003")
        return
    _, unkept = tried(partial(choose_mode, resolved, store))
    if unkept:
        yield Error(unkept, hint=f"See {where}.", id="idempotency_django.E019")
    accepts = resolved.on_conflict == "accepted"
    _, no_view = tried(partial(status_url, "token")) if accepts else (None, "")
    if no_view:
        yield Error(no_view, hint=f"See {where}.", id="idempotency_django.E020")


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
    return [*unknown, *(Error(error, id="idempotency_django.E002") for error in errors)]


def check_stores(**_: Any) -> Sequence[CheckMessage]:
    """Whether every store can be made, and what each reports about its configuration."""
    messages: list[CheckMessage] = []
    for alias in tried(lambda: list(stores))[0] or ():  # else check_settings reports it
        store, error = tried(partial(stores.__getitem__, alias))
        messages += store.check() if store else [Error(error, id="idempotency_django.E003")]
    return messages
