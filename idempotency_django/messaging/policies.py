"""What a consumer is declared with: its policy and its handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from django.core.exceptions import ImproperlyConfigured

from ..policy import UNSET, Policy, scopes
from ..policy.identity import named_fingerprints
from ..stores import Store

LIFETIME: Final = timedelta(days=30)
"""How long a consumer remembers an event, unless it or its policy says otherwise."""


@dataclass(frozen=True, slots=True)
class RecordOf:
    """Where the record of an event or a message is, or would be.

    Attributes:
        store: its store.
        key: its key.
        scope: its scope.
        fingerprints: those that it may have; with another one, it is another event's.
    """

    store: Store
    key: str
    scope: str
    fingerprints: Sequence[str]

    @classmethod
    def named(cls, store: Store, key: str, scope: str, content: str) -> Self:
        """The record of the operation that is planned with these arguments."""
        return cls(store, key, scopes.fit(scope), [*named_fingerprints(key, scope, content)])


def refuse_types(types: Sequence[str], of: str) -> None:
    """Refuse what cannot be the types of events that a handler is for.

    Raises:
        ValueError: there is none.
        TypeError: one of them is not a text.
    """
    if not types:
        raise ValueError(f'on() of {of} needs a type of events: on("order.paid").')
    for given in types:
        if not isinstance(given, str):
            raise TypeError(
                f"on() of {of} takes types of events, and not {given!r}. Name what the handler is "
                'for, in parentheses: on("order.paid").'
            )


def refuse_unfit(handler: Callable[..., Any], of: str) -> None:
    """Refuse a handler that no event could be given to.

    Raises:
        ImproperlyConfigured: it does not take an event and an execution.
    """
    try:
        inspect.signature(handler).bind("event", "execution")
    except TypeError as error:
        raise ImproperlyConfigured(
            f"The handler {getattr(handler, '__qualname__', handler)} of {of} cannot be called "
            f"with an event and its execution: {error}. Declare it as def handler(event, "
            "execution)."
        ) from None
    except ValueError:  # a callable that does not tell its signature
        return


def policy_of(name: str, policy: Policy | None, ttl: timedelta | None, store: str | None) -> Policy:
    """The policy of the consumer of that name.

    Raises:
        ImproperlyConfigured: it asks for what a consumer does not have.
    """
    if policy is not None and policy.check_replay not in (UNSET, None):
        raise ImproperlyConfigured(
            f"The policy of the consumer {name!r} has check_replay=, which checks the caller of an "
            "HTTP request. A message has none: check who may send it before calling the consumer."
        )
    # An event can wait for the store, which a request cannot: it is delivered again.
    policy = (policy or Policy()).over(Policy(ttl=LIFETIME, on_store_error="refuse"))
    if ttl is not UNSET:
        policy = policy.replace(ttl=ttl)
    return policy if store is None else policy.replace(store=store)


def scope_of(name: str, source: str, sender: str, *, federated: bool) -> str:
    """The scope of an event: the consumer's name, the event's source, and who sent it.

    Raises:
        ValueError: a sender is missing, or makes no sense.
    """
    if federated and not sender:
        raise ValueError(
            f"The consumer {name!r} is federated, so each call must say who sent the event. Pass "
            "sender=, as the transport has authenticated them."
        )
    if sender and not federated:
        raise ValueError(
            f"The consumer {name!r} was given a sender, but is not federated. Make it a "
            "Consumer(…, federated=True), or leave out sender=."
        )
    scope = f"consumer:{name}:{source}"
    return scopes.join(scope, f"sender:{sender}") if sender else scopes.join(scope)
