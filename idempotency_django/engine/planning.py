"""A policy and a request become a plan, which the engine runs.

An adapter describes its request as a :class:`PlanRequest`. :func:`make_plan` says which operation
that is, which store keeps its record, and in which mode it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, Literal, Protocol

from django.core.exceptions import ImproperlyConfigured

from ..conf import until_settings_change
from ..errors import KeyGuessable, KeyMalformed
from ..policy import Policy, identity, keys
from ..policy.invocation import Invocation
from ..stores import Store, stores
from ..stores.base import no_transactional_mode
from ..stores.records import Operation
from .context import CURRENT


class PlanRequest(Protocol):
    """A request for a plan, as an adapter describes it."""

    @property
    def method(self) -> str:
        """The HTTP method, or what stands for it elsewhere."""

    def header(self) -> str | None:
        """The client's key as it was sent, or ``None`` if it sent none."""

    def invocation(self) -> Invocation:
        """The invocation for the policy; called only if there may be a key."""


Mode = Literal["transactional", "leased"]


@dataclass(frozen=True, slots=True)
class Plan:
    """An operation with its store, ready to run.

    Attributes:
        policy: the policy, resolved.
        store: where the operation's record lives.
        operation: the operation to execute once. It has a lease in the leased mode only.
        names_key: whether the response names the key, because it was not in the request's header.
    """

    policy: Policy
    store: Store
    operation: Operation
    names_key: bool = False


def make_plan(policy: Policy, request: PlanRequest, *, asynchronous: bool = False) -> Plan | None:
    """The plan for what an adapter was asked for, or ``None`` if it has no key and needs none.

    Args:
        policy: a resolved policy.
        request: what the adapter was asked for.
        asynchronous: whether the handler is async, so that no transaction can span it.

    Raises:
        IdempotencyError: the key is missing, malformed or guessable.
        ImproperlyConfigured: the policy needs what its store or mode cannot promise.
    """
    asked = _Asked(policy, request)
    for source in SOURCES:
        key = source(asked)
        if key is not None:
            break
    else:
        identity.refuse_missing(policy, request.method)
        return None
    store = stores[policy.store]
    mode = choose_mode(policy, store, asynchronous=asynchronous)
    operation = identity.operation(
        policy,
        asked.invocation,
        key=key,
        lease=policy.lease if mode == "leased" else None,
    )
    outer = CURRENT.get()
    if outer is not None:
        operation = replace(operation, caused_by=outer.reference)
    return Plan(policy, store, operation, names_key=source in _NOT_IN_HEADER)


class _Asked:
    """A request, as the sources of its key look at it.

    Args:
        policy: a resolved policy.
        request: the request.
    """

    def __init__(self, policy: Policy, request: PlanRequest) -> None:
        self.policy = policy
        self.request = request
        reads_header = policy.key is None or keys.reads_header(policy.key)
        self.header = request.header() if reads_header else None
        self.is_made_up = self.header is not None and keys.MADE_UP.fullmatch(self.header)

    @cached_property
    def invocation(self) -> Invocation:
        invocation = self.request.invocation()
        return identity.identified(self.policy, invocation) if self.policy.principal else invocation


# The sources of a key, in their order. The first that has one wins.


def _from_client(asked: _Asked) -> str | None:
    """The key in the header, if the client has chosen it."""
    return None if asked.header is None or asked.is_made_up else _in_header(asked, asked.header)


def _from_form(asked: _Asked) -> str | None:
    """The key that the server has written into the form, the same for both clicks of a double."""
    return _from_policy(asked) if keys.form_field_of(asked.policy.key) else None


def _from_browser(asked: _Asked) -> str | None:
    """The key in the header, if a browser has made it up. It is ignored if it cannot be used."""
    if asked.header is None or not asked.is_made_up:
        return None
    try:
        return _in_header(asked, asked.header)
    except (KeyMalformed, KeyGuessable):
        if asked.policy.requires_key(asked.request.method):
            raise
        return None


def _in_header(asked: _Asked, header: str) -> str:
    key = identity.client_key(asked.policy, header)
    if not (asked.invocation.principal or keys.is_unguessable(key)):
        raise KeyGuessable
    return key


def _from_policy(asked: _Asked) -> str | None:
    """The key that the policy's ``key`` makes of the request."""
    return identity.key_of_request(asked.policy, asked.invocation)


SOURCES: Final[tuple[Callable[[_Asked], str | None], ...]] = (
    _from_client,
    _from_form,
    _from_browser,
    _from_policy,
)
_NOT_IN_HEADER: Final = (_from_form, _from_policy)


def plan_call(
    policy: Policy,
    *,
    key: str,
    scope: str,
    name: str,
    content_digest: str,
    method: str,
    asynchronous: bool = False,
    max_attempts: int | None = None,
    caused_by: str = "",
) -> Plan:
    """The plan for a call that names its operation itself, and has no caller to tell apart.

    Args:
        policy: a resolved policy.
        key: the operation's key.
        scope: the namespace that the key is unique in.
        name: the operation's name, for people.
        content_digest: the digest of what is asked for.
        method: what stands for the HTTP method in the audit.
        asynchronous: whether the handler is async, so that no transaction can span it.
        max_attempts: how many attempts may fail or be interrupted before an operator must settle
            it. ``None`` sets no limit.
        caused_by: the reference of the record of the operation that asked for this one. By default,
            it is that of the execution that the call is made in.

    Raises:
        KeyMalformed: the key is not 1-255 visible ASCII characters.
        ImproperlyConfigured: the policy needs what its store or mode cannot promise.
    """
    store = stores[policy.store]
    mode = choose_mode(policy, store, asynchronous=asynchronous)
    operation = identity.named_operation(
        policy,
        key=keys.checked(key),
        scope=scope,
        name=name,
        content=content_digest,
        method=method,
        lease=policy.lease if mode == "leased" else None,
    )
    outer = CURRENT.get()
    if outer is not None and not caused_by:
        caused_by = outer.reference
    if caused_by or max_attempts is not None:
        operation = replace(operation, caused_by=caused_by, max_attempts=max_attempts)
    return Plan(policy, store, operation)


@until_settings_change
@lru_cache(maxsize=1024)
def choose_mode(policy: Policy, store: Store, *, asynchronous: bool = False) -> Mode:
    """The mode of an operation, if the store can do what its policy promises in that mode.

    It is chosen once for each policy and store.

    Args:
        policy: a resolved policy.
        store: where the claim is made.
        asynchronous: whether the handler is async, so that no transaction can span it.

    Raises:
        ImproperlyConfigured: the policy needs what its store or mode cannot promise.
    """
    store.validate(policy)
    if policy.on_expired == "refuse" and not policy.retention:
        raise ImproperlyConfigured(
            "An idempotency policy has on_expired='refuse' and no retention, so an expired record "
            "may be deleted at once, and then its key is new. Give it a retention."
        )
    if policy.mode != "leased" and store.supports_transactions and not asynchronous:
        if policy.on_conflict == "accepted":
            raise ImproperlyConfigured(
                "An idempotency policy has on_conflict='accepted' in the transactional mode, "
                "where other requests cannot see an operation in progress. Give it mode='leased'."
            )
        return "transactional"
    if policy.mode == "transactional":
        raise no_transactional_mode("an async view, for which Django has no transactions")
    if policy.ttl is not None and policy.ttl <= policy.lease:
        raise ImproperlyConfigured(
            f"An idempotency policy has a ttl of {policy.ttl}, which is not longer than its lease "
            f"of {policy.lease}: its responses could expire before they are sent. Make the ttl "
            "longer than the lease."
        )
    return "leased"
