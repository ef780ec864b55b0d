"""Checks of the views that the URLs lead to, and of what protects them."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Warning,  # noqa: A004  # Django's name
)
from django.db import connections

from ..conf import conf, did_you_mean
from ..engine import choose_mode
from ..http.declared import (
    EXEMPT,
    INBOX,
    POLICIES,
    POLICY,
    PROTECTED,
    handlers_of,
    is_exempt,
    module_of,
    policy_of,
    variables_of,
    vars_of,
    view_class_of,
)
from ..http.routes import is_named
from ..policy import UNSET, Policy
from ..stores import stores
from ..stores.atomic_blocks import IN_NINJA
from .configuration import PROJECT, check_policy, each_once, listed, promise, tried
from .inventory import NOT_ENFORCED, Endpoint, endpoints, is_from, routes

_FORMS_WITHOUT_KEYS: Final = ("django.contrib.admin", "django.contrib.auth")
"""Packages of Django whose own forms send no key."""

_HOOKS: Final = (
    "check_idempotent_replay",
    "get_idempotency_key",
    "get_idempotency_policy",
    "get_idempotency_scope",
    "rebuild_idempotent_response",
)
"""The methods of the mixin that a view may have without it."""

_READ: Final = {POLICY, POLICIES, *_HOOKS}
"""The names of attributes that a project can set on a view, or override."""

_SET: Final = {PROTECTED, EXEMPT, INBOX}
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
    """An error for each view with a policy that cannot be protected; one warning for the others."""
    declared: dict[tuple[str, str], Endpoint] = {}
    undeclared: dict[str, str] = {}
    for endpoint in everything:
        if endpoint.problem and _is_undeclared(endpoint):
            if endpoint.is_built_in:
                continue  # such as the admin's, to which no key comes
            undeclared[endpoint.view_name] = endpoint.module
        elif endpoint.problem:
            declared.setdefault((endpoint.view_name, endpoint.problem), endpoint)
    for endpoint in declared.values():
        yield Error(
            endpoint.problem,
            hint=(
                f"It serves {endpoint.route}. Change the view as described, or leave it "
                "unprotected: remove its policy, or add @idempotency_exempt."
            ),
            id="idempotency_django.E022",
        )
    if undeclared:
        modules = [f"{name} ({n})" for name, n in Counter(undeclared.values()).most_common()]
        count = f"{len(undeclared)} view{'' if len(undeclared) == 1 else 's'}"
        hint = "manage.py idempotency_report says why, and what to do, for each view."
        if isinstance(conf.middleware_protects, str):  # it protects all
            hint += (
                " Or list the paths that the middleware protects, such as "
                "IDEMPOTENCY['MIDDLEWARE_PROTECTS'] = ['/api/']."
            )
        yield Warning(
            f"IdempotencyMiddleware cannot protect {count} without a policy, so it refuses their "
            f"requests with a key. They are in {listed(modules, 'module', 'modules')}.",
            hint=hint,
            id="idempotency_django.W023",
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
    yield from _misspelled(endpoint)
    declared = policy_of(endpoint.view, endpoint.method) if endpoint.how == "" else None
    if isinstance(declared, Policy) and not endpoint.problem:  # which nothing reads
        yield Error(
            f"{endpoint.view_name} has an idempotency policy, but is not "
            "protected: a retry with the same key repeats its effects.",
            hint=(
                "For a view of REST framework, make IdempotentViewMixin its first base. "
                "Otherwise, put @idempotent(policy=…) directly above the function that does the "
                "work, or add IdempotencyMiddleware to MIDDLEWARE."
            ),
            id="idempotency_django.E060",
        )
    if endpoint.how not in NOT_ENFORCED and not endpoint.problem:
        yield from _conditional(endpoint)
        yield from _leased_in_transaction(endpoint)
    if endpoint.how in ("decorator", "middleware"):
        where = f"The idempotency policy of {endpoint.view_name}"
        yield from check_policy(endpoint.policy, where)
    if endpoint.how in ("decorator", "mixin") and is_exempt(endpoint.view):
        yield Error(
            f"{endpoint.view_name} is both protected and exempt.",
            hint="Remove either @idempotency_exempt or the protection (@idempotent, the mixin).",
            id="idempotency_django.E024",
        )


def _conditional(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """Django's conditions around what is protected, which a retry meets before its response."""
    view, view_class = endpoint.view, view_class_of(endpoint.view)
    names = ("dispatch", handlers_of(view).get(endpoint.method, ""))
    handlers = [getattr(view_class, name, None) for name in names]
    if any(map(_is_conditional, (view, *handlers))):
        yield Warning(
            f"{endpoint.view_name} has Django's @condition, @etag or @last_modified around "
            "the protected handler, so a retry of a successful change gets 412 instead of a "
            "replay.",
            hint=(
                f"It serves {endpoint.route}. Use @preconditions below @idempotent, or "
                "PreconditionMixin, which also lock the row."
            ),
            id="idempotency_django.W056",
        )


def _is_conditional(view: Any) -> bool:
    """Whether one of Django's conditions is among the decorators of a view or a handler."""
    while view is not None:
        for each in (view, *variables_of(view).get("decorators", ())):  # of method_decorator()
            name = getattr(getattr(each, "__code__", None), "co_qualname", "")
            if module_of(each) == "django.views.decorators.http" and name.startswith("condition."):
                return True
        view = getattr(view, "__wrapped__", None)
    return False


def _leased_in_transaction(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """A view of the leased mode, whose claim cannot be committed under ``ATOMIC_REQUESTS``."""
    around = set() if _is_async(endpoint.view) else _transactions_around(endpoint.view)
    policy, _ = tried((endpoint.policy or Policy()).resolved)
    if policy is None or not around:
        return
    store = stores[policy.store]
    mode, _ = tried(lambda: choose_mode(policy, store))
    if mode == "leased" and (store.using is None or store.using in around):
        yield Error(
            f"{endpoint.view_name} is in the leased mode, but ATOMIC_REQUESTS opens "
            "a transaction around it, so requests with a key fail.",
            hint=(
                f"It serves {endpoint.route}. Mark the view with transaction.non_atomic_requests, "
                f"or use mode='transactional' with a DatabaseStore. {IN_NINJA}"
            ),
            id="idempotency_django.E062",
        )


def _is_async(view: Any) -> bool:
    """Whether the view is a coroutine function, or a class-based view of coroutine functions."""
    view_class = view if inspect.isclass(view) else view_class_of(view)
    return iscoroutinefunction(view) or bool(getattr(view_class, "view_is_async", False))


def _transactions_around(view: Any) -> set[str]:
    """The databases on which Django opens a transaction around it, because of ATOMIC_REQUESTS."""
    databases = connections.settings.items()
    wanted = {using for using, options in databases if options["ATOMIC_REQUESTS"]}
    return wanted.difference(getattr(view, "_non_atomic_requests", ()))


def _misspelled(endpoint: Endpoint) -> Iterator[CheckMessage]:
    """An attribute of a view that nothing reads, and that looks like one that is read."""
    view = endpoint.view
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
                    f"{endpoint.view_name} has an attribute {name!r}, which has no effect.",
                    hint=did_you_mean(name, _READ, "A view can have"),
                    id="idempotency_django.W037",
                )
