"""The system checks (``manage.py check``); their ids are stable and never used twice.

=====================================  =========================================================
id                                     what is wrong
=====================================  =========================================================
``idempotency_django.E001``            ``IDEMPOTENCY`` holds a name that is not a setting
``idempotency_django.E002``            a setting holds a value that it cannot hold
``idempotency_django.E003``            a store cannot be made, or a policy names an unknown store
``idempotency_django.E004``            a store uses a database that is not in ``DATABASES``
``idempotency_django.E005``            a store uses what looks like a replica
``idempotency_django.W006``            SQLite without ``transaction_mode: IMMEDIATE``
``idempotency_django.W007``            effects and answers are in two databases
``idempotency_django.E008``            a store's database is read-only (``check --database``)
``idempotency_django.E009``            middleware after ours, whose ``process_view`` is skipped
``idempotency_django.E010``            our middleware comes before the authentication's
``idempotency_django.E011``            ``IdempotentViewMixin`` after ``APIView``: no protection
``idempotency_django.E012``            ``idempotency_policies`` names an unknown action
``idempotency_django.E013``            a store cannot work with its cache
``idempotency_django.E014``            the Redis server is older than 6.2
``idempotency_django.W015``            the Redis server may evict keys: retries execute again
``idempotency_django.W016``            the Redis server cannot be reached
``idempotency_django.W017``            fewer replicas than ``wait_replicas``: nothing is executed
``idempotency_django.W018``            each process has its own cache of answers
``idempotency_django.E019``            a policy needs what its store or mode cannot promise
``idempotency_django.E020``            ``on_conflict="accepted"`` without a URL for the status view
``idempotency_django.W021``            PostgreSQL with an isolation level above READ COMMITTED
``idempotency_django.E022``            a view cannot be protected and refuses requests with a key
``idempotency_django.E023``            the same for a view of a framework without an adapter
``idempotency_django.E024``            a view is protected and exempt at the same time
``idempotency_django.W025``            object permissions that a replay cannot check
``idempotency_django.W026``            a store in the memory of one process, and ``DEBUG`` is off
``idempotency_django.E027``            a store's database has ``AUTOCOMMIT`` off
``idempotency_django.W028``            a store's tables are missing (``check --database``)
``idempotency_django.W029``            CORS stops scripts of other origins from sending a key
``idempotency_django.W030``            CORS hides the headers of a replay from these scripts
``idempotency_django.W031``            the admin's or the login's own forms need a key and have none
=====================================  =========================================================
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from django.conf import settings
from django.core.checks import (
    CheckMessage,
    Error,
    Tags,
    Warning,  # noqa: A004  # Django's name
    register,
)
from django.core.exceptions import ImproperlyConfigured
from django.urls import get_resolver
from django.utils.module_loading import import_string

from .browsers import check_cors
from .conf import NAMES, conf, default_store, did_you_mean
from .engine import lease_of
from .frameworks import is_from
from .inventory import OURS, Endpoint, endpoints
from .middleware import policy_of, skipped_middleware
from .opening import PROTECTED, innermost, name_of
from .policy import UNSET, Policy
from .policy_fields import UNSAFE_METHODS
from .protection import BY_DECORATOR, is_exempt
from .status import status_url
from .stores import stores

PROJECT = "IDEMPOTENCY['POLICY']"
NAMED = 3
"""How many policies or routes one message names; the others are counted."""
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"

_FORMS_WITHOUT_KEYS = ("django.contrib.admin", "django.contrib.auth")
"""Packages of Django whose views answer forms of their own, which send no key."""

_PROMISES = ("idempotency_django.E019", "idempotency_django.E020")
_FRAMEWORKS = ("django", "idempotency_django", "rest_framework")


def register_checks() -> None:
    """Register the checks; once, when the app is ready."""
    register(check_settings, Tags.security)
    register(check_stores, Tags.security)
    register(check_middleware, Tags.security)
    register(check_views, Tags.security)
    register(check_cors, Tags.compatibility)
    register(check_live_stores, Tags.database)


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
    return [*unknown, *_wrong_values()]


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
    for alias in _aliases():
        try:
            messages += stores[alias].check()
        except ImproperlyConfigured as error:
            messages.append(Error(str(error), id="idempotency_django.E003"))
    try:
        policy = Policy().resolved()
    except ImproperlyConfigured:
        return messages  # check_settings reports it
    return [*messages, *_unknown_store(policy.store, PROJECT)]


def _aliases() -> list[str]:
    """The aliases of the stores; none if ``check_settings`` reports what is wrong with them."""
    try:
        return list(stores)
    except ImproperlyConfigured:
        return []


def _unknown_store(alias: str, where: str) -> Iterator[CheckMessage]:
    aliases = _aliases()
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


def check_live_stores(
    *, databases: Sequence[str] | None = None, **_: Any
) -> Sequence[CheckMessage]:
    """Ask the stores themselves, where their database may be asked (``check --database``)."""
    messages: list[CheckMessage] = []
    for alias in _aliases():
        try:
            store = stores[alias]
        except ImproperlyConfigured:
            continue  # check_stores reports it
        if store.using in (databases or ()):
            messages += store.check_live()
    return messages


def check_middleware(**_: Any) -> Iterator[CheckMessage]:
    """The place of :class:`~idempotency_django.middleware.IdempotencyMiddleware`."""
    paths = list(settings.MIDDLEWARE)
    if OURS not in paths:
        return
    for path in skipped_middleware():
        yield Error(
            f"{path} comes after {OURS}, which runs views itself and skips its process_view.",
            hint="Move IdempotencyMiddleware after it in MIDDLEWARE.",
            id="idempotency_django.E009",
        )
    if AUTHENTICATION in paths[paths.index(OURS) :]:
        yield Error(
            f"{OURS} comes before {AUTHENTICATION}, so every caller counts as anonymous.",
            hint="Move IdempotencyMiddleware after it in MIDDLEWARE.",
            id="idempotency_django.E010",
        )


def check_views(**_: Any) -> Sequence[CheckMessage]:
    """The views of the URLs, the views with the mixin, and the promises of all policies."""
    project = list(_promise(Policy(), PROJECT))
    # A view inherits what is wrong with the project's policy, which is reported only once.
    known = {message.msg for message in project}
    found = chain(_of_views(), _of_endpoints())
    views = [message for message in found if message.msg not in known]
    return _each_once([*project, *views])


def _of_views() -> Iterator[CheckMessage]:
    if getattr(settings, "ROOT_URLCONF", None):
        _views = get_resolver().url_patterns  # imports them
    drf = sys.modules.get("idempotency_django.drf")  # there if a view has the mixin
    if drf is None:
        return
    for view in dict.fromkeys(_subclasses(drf.IdempotentViewMixin)):
        if vars(view).get(PROTECTED) != BY_DECORATOR:  # which is among the endpoints
            yield from _check_view(view, drf.IdempotentViewMixin)
    check_objects = import_string("idempotency_django.drf_checks.check_objects")
    yield from check_objects()


def _of_endpoints() -> Iterator[CheckMessage]:
    if not getattr(settings, "ROOT_URLCONF", None):
        return
    try:
        _settings = conf.middleware_exempt, conf.middleware_protects
    except ImproperlyConfigured:
        return  # check_settings reports it
    everything = list(endpoints())
    yield from _frameworks(everything)
    yield from _locked_out(everything)
    told: set[tuple[Any, str]] = set()  # a view may have many routes
    for endpoint in everything:
        for message in _check_endpoint(endpoint):
            if (endpoint.view, message.msg) not in told:
                told.add((endpoint.view, message.msg))
                yield message


def _frameworks(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """One message for each framework that has no adapter, with its routes."""
    routes: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    for endpoint in everything:
        if endpoint.framework is not None:
            problems.setdefault(endpoint.framework, endpoint.problem)
            routes.setdefault(endpoint.framework, []).append(endpoint.route)
    for framework, problem in problems.items():
        hint = f"It serves {_routes(routes[framework])}."
        yield Error(problem, hint=hint, id="idempotency_django.E023")


def _routes(routes: Sequence[str]) -> str:
    more = len(routes) - NAMED
    return f"{', '.join(routes[:NAMED])}{f' and {more} more routes' if more > 0 else ''}"


def _locked_out(everything: Iterable[Endpoint]) -> Iterator[CheckMessage]:
    """One warning where the project's policy requires a key of forms that have none."""
    try:
        policy = Policy().resolved()
    except ImproperlyConfigured:
        return  # said by check_settings
    locked = [
        endpoint.route
        for endpoint in everything
        if endpoint.how == "middleware"
        and endpoint.policy is not None  # what it declares is a policy
        and policy_of(endpoint.view, endpoint.method) is UNSET
        and policy.requires_key("POST" if endpoint.method == "*" else endpoint.method)
        and is_from(endpoint.view, _FORMS_WITHOUT_KEYS)
    ]
    if locked:
        yield Warning(
            f"{PROJECT} requires a key of Django's own forms, which send none. They are refused: "
            f"{_routes([*dict.fromkeys(locked)])}.",
            hint=(
                "Put 'django.contrib.admin' and 'django.contrib.auth' into "
                "IDEMPOTENCY['MIDDLEWARE_EXEMPT']."
            ),
            id="idempotency_django.W031",
        )


def _check_endpoint(endpoint: Endpoint) -> Iterator[CheckMessage]:
    if endpoint.problem and endpoint.framework is None:
        hint = (
            f"It serves {endpoint.route}. Change the view as the message says, or leave it "
            "unprotected: with @idempotency_exempt, or without @idempotent or the mixin."
        )
        yield Error(endpoint.problem, hint=hint, id="idempotency_django.E022")
    if endpoint.how in ("decorator", "middleware"):
        where = f"The idempotency policy of {name_of(innermost(endpoint.view))}"
        yield from _check_policy(endpoint.policy, where)
    if endpoint.how in ("decorator", "mixin") and is_exempt(endpoint.view):
        yield Error(
            f"{name_of(innermost(endpoint.view))} is protected and exempt at the same time.",
            hint="Remove @idempotency_exempt, or remove what protects the view.",
            id="idempotency_django.E024",
        )


def _check_view(view: Any, mixin: type) -> Iterator[CheckMessage]:
    name = f"{view.__module__}.{view.__qualname__}"
    drf_bases = [base for base in view.__mro__ if base.__module__ == "rest_framework.views"]
    if not drf_bases:
        return  # a mixin of the project's own, for views that have what it names
    if view.__mro__.index(mixin) > view.__mro__.index(drf_bases[0]):
        yield Error(
            f"{name} has IdempotentViewMixin after APIView in its bases, so it is not protected.",
            hint=f"Put the mixin first: class {view.__name__}(IdempotentViewMixin, …).",
            id="idempotency_django.E011",
        )
    yield from _check_policy(view.idempotency_policy, f"{name}.idempotency_policy")
    policies = view.idempotency_policies
    if not isinstance(policies, Mapping):
        yield Error(
            f"{name}.idempotency_policies is a {type(policies).__name__}; it must be a dict of "
            "policies by action.",
            id="idempotency_django.E002",
        )
        return
    for action, policy in policies.items():
        yield from _check_action(view, action, f"{name}.idempotency_policies")
        yield from _check_policy(policy, f"{name}.idempotency_policies[{action!r}]")


def _check_action(view: Any, action: str, where: str) -> Iterator[CheckMessage]:
    if not hasattr(view, action):
        handlers = _handlers_of(view)
        yield Error(
            f"{where} names {action!r}, which is not an action or a method of the view.",
            hint=did_you_mean(action, handlers, "The view has") if handlers else None,
            id="idempotency_django.E012",
        )


def _handlers_of(view: Any) -> set[str]:
    """The names that ``idempotency_policies`` can hold for a view.

    They are the handlers of unsafe methods, and in a viewset the actions: DRF's, which are in its
    mixins, and the methods that the project's own classes add to what DRF's have.
    """
    theirs: set[str] = set()
    actions: set[str] = set()
    for base in view.__mro__:
        module, functions = base.__module__, {*filter(_is_public, vars(base))}
        if module == "rest_framework.mixins":
            actions |= {name for name in functions if not name.startswith(("perform_", "get_"))}
        elif module.partition(".")[0] in _FRAMEWORKS:
            theirs |= functions
        else:
            actions |= {name for name in functions if inspect.isfunction(vars(base)[name])}
    handlers = {method.lower() for method in UNSAFE_METHODS if hasattr(view, method.lower())}
    if not hasattr(view, "get_extra_actions"):
        return handlers
    overridable = {name for name in actions if name.startswith("perform_")}
    return handlers | actions - theirs - overridable


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _check_policy(policy: Any, where: str) -> Iterator[CheckMessage]:
    if policy is None:
        return
    if not isinstance(policy, Policy):
        yield Error(
            f"{where} is a {type(policy).__name__}; it must be a Policy or None.",
            id="idempotency_django.E002",
        )
        return
    if policy.store is not UNSET:
        yield from _unknown_store(policy.store, where)
    yield from _promise(policy, where)


def _promise(policy: Policy, where: str) -> Iterator[CheckMessage]:
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


def _each_once(messages: Iterable[CheckMessage]) -> Sequence[CheckMessage]:
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


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
