"""Checks of the views that the URLs lead to, and of what protects them."""

from __future__ import annotations

import difflib
import inspect
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004  # Django's name
)

from ..conf import conf, did_you_mean
from ..engine import lease_of
from ..http.routes import is_named
from ..http.unwrapping import (
    EXEMPT,
    INBOX,
    PART,
    POLICIES,
    POLICY,
    PROTECTED,
    handlers_of,
    innermost,
    is_async,
    is_conditional_outside,
    is_exempt,
    is_from,
    name_of,
    policy_of,
    transactions_around,
    vars_of,
    view_class_of,
)
from ..http.wrapping import HOOKS, misplaced_mixin
from ..policy import UNSET, Policy
from ..stores import stores
from ..stores.atomic_blocks import IN_NINJA
from .configuration import PROJECT, check_policy, each_once, listed, promise, tried
from .inventory import NOT_ENFORCED, Endpoint, endpoints, routes

_FORMS_WITHOUT_KEYS: Final = ("django.contrib.admin", "django.contrib.auth")
"""Packages of Django whose own forms send no key."""

_MOST_REFUSED: Final = 10
"""The most refused views without a policy that are named one by one; more are counted."""

_READ: Final = {POLICY, POLICIES, *HOOKS}
"""The names of attributes that a project can set on a view, or override."""

_SET: Final = {PROTECTED, EXEMPT, INBOX, PART}
"""The names of attributes that this package sets."""

of_frameworks: Final[list[Callable[[], Iterator[CheckMessage]]]] = []
"""The checks of views by the adapters of other frameworks."""


def check_views(**_: Any) -> Sequence[CheckMessage]:
    """The views of the URLs, the views with the mixin, and the promises of all policies."""
    project = list(promise(Policy(), PROJECT))
    # A view inherits the problems of the project's policy, which are reported only once.
    known = {message.msg for message in project}
    if tried(lambda: conf.middleware_protects)[1]:
        return project  # check_settings reports it
    messages = chain(*(check() for check in of_frameworks), _of_endpoints())
    views = [message for message in messages if message.msg not in known]
    return each_once([*project, *views])


def _of_endpoints() -> Iterator[CheckMessage]:
    if not getattr(settings, "ROOT_URLCONF", None):
        return
    everything = list(endpoints())
    yield from _frameworks(everything)
    yield from _locked_out(everything)
    yield from _names_no_route()
    yield from _refused(everything)
    reported: set[tuple[int, str]] = set()  # a view may have many routes, and no hash
    for endpoint in everything:
        for message in _check_endpoint(endpoint):
            if (id(endpoint.view), message.msg) not in reported:
                reported.add((id(endpoint.view), message.msg))
                yield message


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


def _frameworks(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """One message for each framework that has no adapter, with its routes."""
    found: dict[str, list[Endpoint]] = {}
    for endpoint in everything:
        if endpoint.framework is not None:
            found.setdefault(endpoint.framework, []).append(endpoint)
    for served in found.values():
        hint = f"It serves {_routes(served)}."
        yield Error(served[0].problem, hint=hint, id="idempotency_django.E022")


def _routes(served: Iterable[Endpoint]) -> str:
    return listed([*dict.fromkeys(each.route for each in served)], "route", "routes")


def _locked_out(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """One warning where the project's policy requires a key of forms that have none."""
    policy, _ = tried(Policy().resolved)
    locked = [
        endpoint
        for endpoint in everything
        if policy
        and _is_undeclared(endpoint)
        and policy.requires_key(_typical(endpoint.method))
        and is_from(endpoint.view, _FORMS_WITHOUT_KEYS)
    ]
    if locked:
        yield Warning(
            f"{PROJECT} requires a key from Django's own forms, which send none, so they are "
            f"refused: {_routes(locked)}.",
            hint=(
                "List the paths that the middleware protects, such as "
                "IDEMPOTENCY['MIDDLEWARE_PROTECTS'] = ['/api/']."
            ),
            id="idempotency_django.W031",
        )


def _refused(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """One error for each view that cannot be protected; many without a policy are one warning."""
    named: dict[tuple[int, str], Endpoint] = {}
    undeclared: dict[int, str] = {}
    for endpoint in everything:
        view_class = view_class_of(endpoint.view)
        if not endpoint.problem or endpoint.framework or misplaced_mixin(view_class):
            continue  # others have a check of their own
        named.setdefault((id(endpoint.view), endpoint.problem), endpoint)
        if _is_undeclared(endpoint):
            view = inspect.unwrap(view_class or endpoint.view)
            undeclared[id(view)] = view.__module__
    is_counted = len(undeclared) > _MOST_REFUSED
    if is_counted:
        modules = [f"{name} ({n})" for name, n in Counter(undeclared.values()).most_common()]
        yield Warning(
            f"{len(undeclared)} views that declare no policy cannot be protected by "
            "IdempotencyMiddleware, so it refuses their requests with a key. They are in "
            f"{listed(modules, 'module', 'modules')}.",
            hint=(
                "List the paths that the middleware protects, such as "
                "IDEMPOTENCY['MIDDLEWARE_PROTECTS'] = ['/api/']. manage.py idempotency_report "
                "gives the reason for each view."
            ),
            id="idempotency_django.W023",
        )
    for endpoint in named.values():
        if not (is_counted and _is_undeclared(endpoint)):
            yield Error(
                endpoint.problem,
                hint=(
                    f"It serves {endpoint.route}. Change the view as described, or leave it "
                    "unprotected: add @idempotency_exempt, or remove @idempotent or the mixin."
                ),
                id="idempotency_django.E022",
            )


def _is_undeclared(endpoint: Endpoint) -> bool:
    """Whether the middleware protects a view that declares no policy."""
    return (
        endpoint.how == "middleware"
        and endpoint.policy is not None  # its declaration is a policy
        and policy_of(endpoint.view, endpoint.method) is UNSET
    )


def _typical(method: str) -> str:
    """The method, or a typical method if the view declares none."""
    return "POST" if method == "*" else method


def _check_endpoint(endpoint: Endpoint) -> Iterator[CheckMessage]:
    yield from _misspelled(endpoint.view)
    declared = policy_of(endpoint.view, endpoint.method) if endpoint.how == "" else None
    if isinstance(declared, Policy) and not endpoint.problem:  # which nothing reads
        yield Error(
            f"{name_of(innermost(endpoint.view))} has an idempotency policy, but is not "
            "protected: a retry with the same key repeats its effects.",
            hint=(
                "For a view of REST framework, make IdempotentViewMixin its first base. "
                "Otherwise, put @idempotent(policy=…) on the view, or add IdempotencyMiddleware "
                "to MIDDLEWARE."
            ),
            id="idempotency_django.E060",
        )
    if endpoint.how not in NOT_ENFORCED:
        yield from _conditional(endpoint)
        yield from _leased_in_transaction(endpoint)
    if endpoint.how in ("decorator", "middleware"):
        where = f"The idempotency policy of {name_of(innermost(endpoint.view))}"
        yield from check_policy(endpoint.policy, where)
    if endpoint.how in ("decorator", "mixin") and is_exempt(endpoint.view):
        yield Error(
            f"{name_of(innermost(endpoint.view))} is both protected and exempt.",
            hint="Remove either @idempotency_exempt or the protection (@idempotent, the mixin).",
            id="idempotency_django.E024",
        )


def _conditional(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """Django's conditions around what is protected, which a retry meets before its response."""
    view = endpoint.view
    names = ("dispatch", handlers_of(view).get(endpoint.method, ""))
    bases = getattr(view_class_of(view), "__mro__", ())
    own = (vars_of(base) for base in bases if not base.__module__.startswith("idempotency_django."))
    found = ChainMap(*map(dict, own))
    if any(map(is_conditional_outside, (view, *(found[name] for name in names if name in found)))):
        yield Warning(
            f"{name_of(innermost(view))} has Django's @condition, @etag or @last_modified around "
            "the protected handler, so a retry of a successful change gets 412 instead of a "
            "replay.",
            hint=(
                f"It serves {endpoint.route}. Put it on the function itself, below all other "
                "decorators. Or use @preconditions or PreconditionMixin, which also lock the row."
            ),
            id="idempotency_django.W056",
        )


def _leased_in_transaction(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """A view of the leased mode, whose claim cannot be committed under ``ATOMIC_REQUESTS``."""
    around = set() if is_async(endpoint.view) else transactions_around(endpoint.view)
    policy, _ = tried((endpoint.policy or Policy()).resolved)
    if policy is None or not around:
        return
    store = stores[policy.store]
    lease, _ = tried(lambda: lease_of(policy, store))
    if lease is not None and (store.using is None or store.using in around):
        yield Error(
            f"{name_of(innermost(endpoint.view))} is in the leased mode, but ATOMIC_REQUESTS opens "
            "a transaction around it, so requests with a key fail.",
            hint=(
                f"It serves {endpoint.route}. Mark the view with transaction.non_atomic_requests, "
                f"or use mode='transactional' with a DatabaseStore. {IN_NINJA}"
            ),
            id="idempotency_django.E062",
        )


def _misspelled(view: Any) -> Iterator[CheckMessage]:
    """An attribute of a view that nothing reads, and that looks like one that is read."""
    owners: list[Any] = [view, *getattr(view_class_of(view), "__mro__", ())]
    for owner in owners:
        if getattr(owner, "__module__", "").partition(".")[0] == "idempotency_django":
            continue
        for name in vars_of(owner):
            if "idemp" not in name or name.startswith("_") or name in _READ | _SET:
                continue
            if name.startswith("idempotency_") or difflib.get_close_matches(
                name, _READ, cutoff=0.85
            ):
                yield Warning(
                    f"{name_of(innermost(view))} has an attribute {name!r}, which has no effect.",
                    hint=did_you_mean(name, _READ, "A view can have"),
                    id="idempotency_django.W037",
                )
