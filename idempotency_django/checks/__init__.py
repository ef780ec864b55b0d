"""The system checks (``manage.py check``); their ids are stable and never used twice.

=====================================  =========================================================
id                                     problem
=====================================  =========================================================
``idempotency_django.E001``            ``IDEMPOTENCY`` has an unknown setting
``idempotency_django.E002``            a setting has an invalid value
``idempotency_django.E003``            a store cannot be created or used, or a policy names no store
``idempotency_django.W007``            a store's database is not that of the effects or messages
``idempotency_django.E012``            ``idempotency_policies`` names an unknown action
``idempotency_django.W015``            the Redis server may evict keys: retries execute again
``idempotency_django.W016``            the Redis server cannot be reached
``idempotency_django.W018``            a store's cache is local to each process
``idempotency_django.E019``            a policy needs a feature that its store or mode lacks
``idempotency_django.E020``            ``on_conflict="accepted"`` without a URL for the status view
``idempotency_django.E022``            a view with a policy cannot be protected: it refuses keys
``idempotency_django.W023``            the middleware cannot protect views without a policy
``idempotency_django.W026``            a store in the memory of one process, and ``DEBUG`` is off
``idempotency_django.E032``            a model without both ``Versioned`` and one ``VersionField``
``idempotency_django.E034``            a form of the admin that may lack a model's version
``idempotency_django.E041``            a receiver of webhooks cannot be used
``idempotency_django.E043``            a topic of the outbox cannot be used
``idempotency_django.E060``            a view has a policy, but no protection
``idempotency_django.W061``            a Celery task has a policy or key, but not our base class
``idempotency_django.E062``            a leased view is in a transaction of ``ATOMIC_REQUESTS``
``idempotency_django.W071``            ``MIDDLEWARE_PROTECTS`` names no route or namespace
``idempotency_django.W072``            a Django that this version was not tested with
=====================================  =========================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import django
from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Tags,
    Warning,  # noqa: A004  # Django's name
    register,
)
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..conf import did_you_mean
from ..contrib.messaging.conf import conf  # of all names in IDEMPOTENCY
from ..engine import choose_mode
from ..http.declared import POLICIES, initkwargs_of, is_named, policy_of, view_class_of
from ..http.status import status_url
from ..policy import INHERITED, Policy
from ..stores import stores
from ..stores.transactions import IN_NINJA
from .inventory import Endpoint, endpoint_of, endpoints, readable_route, routes

__all__ = ["Endpoint", "endpoint_of", "endpoints", "readable_route", "register_checks"]

_T = TypeVar("_T")

NEWEST_DJANGO: Final = (6, 1)
"""The newest that the tests run on; no upper bound keeps a project from a later one."""


def register_checks() -> None:
    """Register the checks; once, when the app is ready."""
    register(check_settings, Tags.security)
    register(check_stores, Tags.security)
    register(check_views, Tags.security)
    register(check_django, Tags.compatibility)


# The settings, the stores and the policies.


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


# The views that the URLs lead to, and what protects them.


def check_views(**_: Any) -> Sequence[CheckMessage]:
    """The project's policy, and the views of the URLs: what many share is said once."""
    found = chain(check_policy(INHERITED, "IDEMPOTENCY['POLICY']"), _of_views())
    once: dict[tuple[Any, str], CheckMessage] = {}
    for message in found:
        once.setdefault((message.id, message.msg), message)
    return list(once.values())


def _of_views() -> Iterator[CheckMessage]:
    if not getattr(settings, "ROOT_URLCONF", None) or tried(lambda: conf.middleware_protects)[1]:
        return  # there are none; or check_settings reports the setting
    everything = list(endpoints())
    yield from _names_no_route()
    yield from _refused(everything)
    for endpoint in everything:
        yield from _check_endpoint(endpoint)


def _names_no_route() -> Iterator[CheckMessage]:
    """Parts of ``MIDDLEWARE_PROTECTS`` that protect nothing, such as a misspelt prefix."""
    chosen, known = conf.middleware_protects, list(routes())
    for each in () if isinstance(chosen, str) else chosen:
        if not any(is_named(each, route.readable, route.namespaces) for route in known):
            yield Warning(
                f"IDEMPOTENCY['MIDDLEWARE_PROTECTS'] has {each!r}, which no route begins with and "
                "no URL namespace is called, so it protects no view.",
                hint="Write a prefix such as '/api/', or the namespace of an include().",
                id="idempotency_django.W071",
            )


def _refused(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """An error for each view with a policy that cannot be protected; one warning for the others."""
    undeclared: dict[str, str] = {}
    for endpoint in everything:
        if not endpoint.problem:
            continue
        if endpoint.policy is not INHERITED:
            yield Error(
                f"{endpoint.view_name} cannot be protected: {endpoint.problem}",
                hint=(
                    f"It serves {endpoint.route}. Change the view as described, or leave it "
                    "unprotected: remove its policy, or add @idempotency_exempt."
                ),
                id="idempotency_django.E022",
            )
        elif not endpoint.is_built_in:  # such as the admin's, to which no key comes
            undeclared[endpoint.view_name] = endpoint.source.__module__
    if undeclared:
        modules = [f"{name} ({n})" for name, n in Counter(undeclared.values()).most_common()]
        count = f"{len(undeclared)} view{'' if len(undeclared) == 1 else 's'}"
        yield Warning(
            f"IdempotencyMiddleware cannot protect {count} without a policy, so it refuses their "
            f"requests with a key. They are in {', '.join(modules)}.",
            hint=(
                "manage.py idempotency_report says why, and what to do, for each view. Or list "
                "the paths that the middleware protects, such as "
                "IDEMPOTENCY['MIDDLEWARE_PROTECTS'] = ['/api/']."
            ),
            id="idempotency_django.W023",
        )


def _check_endpoint(endpoint: Endpoint) -> Iterator[CheckMessage]:
    view, name = endpoint.view, endpoint.view_name
    if endpoint.policy is not None and not endpoint.problem:
        yield from check_policy(endpoint.policy, f"the idempotency policy of {name}")
        yield from _leased_in_transaction(endpoint)
    elif endpoint.how == "" and isinstance(policy_of(view, endpoint.method), Policy):
        yield Error(
            f"{name} has an idempotency policy, but is not protected: a retry with the same key "
            "repeats its effects.",
            hint=(
                "For a view of REST framework, make IdempotentViewMixin its first base. "
                "Otherwise, put @idempotent(policy=…) directly above the function that does the "
                "work, or add IdempotencyMiddleware to MIDDLEWARE."
            ),
            id="idempotency_django.E060",
        )
    view_class = view_class_of(view)
    policies = initkwargs_of(view).get(POLICIES, getattr(view_class, POLICIES, None))
    for action in policies if isinstance(policies, Mapping) else ():
        if not hasattr(view_class, action):
            yield Error(
                f"{name}.idempotency_policies names {action!r}, which is not an action or a "
                "method of the view.",
                id="idempotency_django.E012",
            )


def _leased_in_transaction(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """A view of the leased mode, whose claim cannot be committed under ``ATOMIC_REQUESTS``."""
    databases = connections.settings.items()
    around = {using for using, options in databases if options["ATOMIC_REQUESTS"]}
    around -= getattr(endpoint.view, "_non_atomic_requests", set())
    policy, _ = tried(lambda: endpoint.enforced)
    store, _ = tried(lambda: stores[policy.store]) if policy else (None, "")
    if policy is None or store is None:
        return  # other checks report it
    mode, _ = tried(lambda: choose_mode(policy, store))
    if around and mode == "leased" and (store.using is None or store.using in around):
        yield Error(
            f"{endpoint.view_name} is in the leased mode, but ATOMIC_REQUESTS opens "
            "a transaction around it, so requests with a key fail.",
            hint=(
                f"It serves {endpoint.route}. Mark the view with transaction.non_atomic_requests, "
                f"or use mode='transactional' with a DatabaseStore. {IN_NINJA}"
            ),
            id="idempotency_django.E062",
        )
