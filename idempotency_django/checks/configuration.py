"""Checks of the settings, the stores and the order of the middleware."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004  # Django's name
)
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import MIDDLEWARE, NAMES, conf, did_you_mean
from ..http.messages import known_since
from ..middleware import skipped_middleware
from ..policy import Policy
from ..stores import stores
from .policies import PROJECT, known_stores, unknown_store

AUTHENTICATION: Final = "django.contrib.auth.middleware.AuthenticationMiddleware"


def check_settings(**_: Any) -> Sequence[CheckMessage]:
    """The names and values in ``IDEMPOTENCY``."""
    try:
        names = conf.raw
    except ImproperlyConfigured as error:
        return [Error(str(error), id="idempotency_django.E002")]
    unknown: list[CheckMessage] = [
        Error(
            f"IDEMPOTENCY has no setting {name!r}.",
            hint=did_you_mean(str(name), NAMES),
            id="idempotency_django.E001",
        )
        for name in names
        if name not in NAMES
    ]
    return [*unknown, *_wrong_values(), *_misnamed()]


def _misnamed() -> Iterator[CheckMessage]:
    """A setting of the project that looks like ours, where ours is missing: none of it is read."""
    if hasattr(settings, "IDEMPOTENCY"):
        return
    for name in filter(str.isupper, dir(settings)):
        if "IDEMP" not in name and not difflib.get_close_matches(name, ["IDEMPOTENCY"], cutoff=0.8):
            continue
        value = getattr(settings, name)
        holds_ours = isinstance(value, Mapping) and not NAMES.isdisjoint(value)
        if holds_ours or name.removeprefix("IDEMPOTENCY_") in NAMES:
            yield Error(
                f"The setting {name} is not read: the settings of idempotency_django are a dict "
                "named IDEMPOTENCY.",
                hint=(
                    "Rename it to IDEMPOTENCY."
                    if holds_ours
                    else f"Write IDEMPOTENCY = {{{name.removeprefix('IDEMPOTENCY_')!r}: …}}."
                ),
                id="idempotency_django.E038",
            )


def _wrong_values() -> Iterator[CheckMessage]:
    readers: list[Callable[[], object]] = [
        partial(getattr, conf, name.lower()) for name in sorted(NAMES)
    ]
    for read in [*readers, Policy().resolved]:
        try:
            read()
        except ImproperlyConfigured as error:
            yield Error(str(error), id="idempotency_django.E002")


def check_stores(**_: Any) -> Sequence[CheckMessage]:
    """Whether every store can be made, and what each reports about its configuration."""
    messages: list[CheckMessage] = []
    for alias in known_stores():
        try:
            messages += stores[alias].check()
        except ImproperlyConfigured as error:
            messages.append(Error(str(error), id="idempotency_django.E003"))
    try:
        policy = Policy().resolved()
    except ImproperlyConfigured:
        return messages  # check_settings reports it
    return [*messages, *unknown_store(policy.store, PROJECT)]


def check_callers(**_: Any) -> Sequence[CheckMessage]:
    """Whether a second person with a deleted user's primary key is told from the first one."""
    try:
        model, policy = get_user_model(), Policy().resolved()
    except ImproperlyConfigured:
        return []  # Django, or check_settings, reports it
    if policy.principal is not None or known_since(model) is not None:
        return []
    return [
        Warning(
            f"{model._meta.label} has the primary key {model._meta.pk.name!r}, which may be given "
            "to a second person after the first one is deleted. Nothing tells the two apart, so "
            "the second one would get replays of the first one's answers.",
            hint="Give the model a DateTimeField(auto_now_add=True), or the policy a principal=.",
            obj=model,
            id="idempotency_django.W039",
        )
    ]


def check_live_stores(
    *, databases: Sequence[str] | None = None, **_: Any
) -> Sequence[CheckMessage]:
    """Ask the stores themselves, where their database may be asked (``check --database``)."""
    messages: list[CheckMessage] = []
    for alias in known_stores():
        try:
            store = stores[alias]
        except ImproperlyConfigured:
            continue  # check_stores reports it
        if store.using in (databases or ()):
            messages += store.check_live()
    return messages


def check_template_middleware(**_: Any) -> Iterator[CheckMessage]:
    """Middleware that may change a template's context, which has no effect on protected pages."""
    for path in settings.MIDDLEWARE:
        try:
            middleware = import_string(path)
        except ImportError:
            continue  # Django says so
        if hasattr(middleware, "process_template_response"):
            yield Warning(
                f"{path} has a process_template_response. Where a request has an idempotency key, "
                "the page is rendered before it, and a replay does not call it: a change of the "
                "template or its context has no effect.",
                hint=(
                    "Add to the context with a context processor. If it only sets headers or "
                    "cookies, or no view with a key answers with a template, silence this check."
                ),
                obj=middleware,
                id="idempotency_django.W057",
            )


def check_middleware(**_: Any) -> Iterator[CheckMessage]:
    """The place of :class:`~idempotency_django.middleware.IdempotencyMiddleware`."""
    paths = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in paths:
        return
    for path in skipped_middleware():
        yield Error(
            f"{path} comes after {MIDDLEWARE}, which runs views itself and skips its process_view.",
            hint="Move IdempotencyMiddleware after it in MIDDLEWARE.",
            id="idempotency_django.E009",
        )
    if AUTHENTICATION in paths[paths.index(MIDDLEWARE) :]:
        yield Error(
            f"{MIDDLEWARE} comes before {AUTHENTICATION}, so every caller counts as anonymous.",
            hint="Move IdempotencyMiddleware after it in MIDDLEWARE.",
            id="idempotency_django.E010",
        )
