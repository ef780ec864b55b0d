"""Checks of the views that the URLs lead to, and of what protects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004  # Django's name
)
from django.db import connections

from ..conf import conf
from ..engine import choose_mode
from ..http.declared import POLICIES, initkwargs_of, is_named, policy_of, view_class_of
from ..policy import INHERITED, Policy
from ..stores import stores
from ..stores.transactions import IN_NINJA
from .configuration import check_policy, tried
from .inventory import Endpoint, endpoints, routes


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
