"""What identifies an operation: its key, its scope, and the fingerprint of what is asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import conf
from ..errors import KeyGuessable, KeyMalformed, KeyMissing
from ..records import Operation
from . import Policy, keys, scopes
from .canonical import content_digest
from .invocation import Invocation
from .seals import sealed

# The key.


def client_key(policy: Policy, header: str | None) -> str | None:
    """The key in the value of the key header; ``None`` if the header does not count.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    if header is None or not policy.client_key:
        return None
    usual = keys.USUAL.fullmatch(header)
    key = usual[1] if usual else keys.parse_header(header)
    return key if policy.key_format == "any" else _in_format(policy, key)


def derived_key(policy: Policy, invocation: Invocation) -> str | None:
    """The key that is derived from the invocation, if there is one.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    derived = policy.key(invocation) if policy.key else None
    if derived is None:
        return None
    if not isinstance(derived, str):
        raise _no_text("key", derived)
    return _in_format(policy, keys.checked(derived))


def refuse_missing(policy: Policy, method: str) -> None:
    """Raise ``KeyMissing`` when a request with this method must bring a key."""
    if policy.requires_key(method):
        raise KeyMissing(_how_to_send_a_key(policy))


def refuse_guessable(invocation: Invocation, key: str) -> None:
    """Raise ``KeyGuessable`` if only a guessable key of the client protects the answer.

    That is the case for callers who are not told apart: they share a scope.
    """
    if not invocation.principal and not keys.is_unguessable(key):
        raise KeyGuessable


def _in_format(policy: Policy, key: str) -> str:
    if policy.key_format == "any" or keys.has_format(key, policy.key_format):
        return key
    raise KeyMalformed(
        "The idempotency key is not in the format that this operation requires: "
        f"{policy.key_format}."
    )


def _how_to_send_a_key(policy: Policy) -> str:
    field = getattr(policy.key, keys.FIELD_OF_FORM, None)
    places = [f"the header {conf.header}"] if policy.client_key else []
    places += [f"the field {field!r} of its form"] if field else []
    if not places:
        return (
            "This operation takes its idempotency key from fields of the request, and one of "
            "them is missing. Send all of them."
        )
    return (
        f"This operation requires {' or '.join(places)}. Send a new, unique key with each "
        "new operation and the same key with each retry of it."
    )


# The operation.


def identified(policy: Policy, invocation: Invocation) -> Invocation:
    """The invocation, with the principal that the policy knows it to be from."""
    if policy.principal is None:
        return invocation
    principal = policy.principal(invocation)
    if principal is None:
        return invocation
    if not isinstance(principal, str):
        raise _no_text("principal", principal)
    return invocation.changed(principal=principal)


def operation(
    policy: Policy,
    invocation: Invocation,
    *,
    key: str,
    scope: str | None = None,
    lease: timedelta | None = None,
) -> Operation:
    """The operation that an invocation with this key asks for.

    Args:
        policy: a resolved policy.
        invocation: what is asked for, and by whom.
        key: its key.
        scope: overrides the policy's scope.
        lease: how long a claim on it lives; ``None``: as long as its transaction.
    """
    if policy.operation:
        invocation = invocation.changed(name=policy.operation)
    asked_for = policy.fingerprint(invocation)
    if not isinstance(asked_for, str | bytes):
        raise _no_text("fingerprint", asked_for)
    content = content_digest(asked_for)
    if scope is None:
        scope = policy.scope(invocation)
    if not isinstance(scope, str):
        raise _no_text("scope", scope)
    if not scope:
        raise ImproperlyConfigured(
            f"The scope of an idempotency policy is empty for {invocation.name}. Its scope= or "
            "the view's get_idempotency_scope() must name what the key is unique in."
        )
    if policy.hosts == "separate":
        scope = scopes.join(invocation.host, scope)
    caller = (invocation.principal or invocation.credentials) if policy.bind_principal else ""
    host = invocation.host if policy.hosts == "refuse" else ""
    bound = (scope, key, caller, host)
    aliases: tuple[str, ...] = ()
    if caller and caller == invocation.credentials:
        # The same request, sent without the credentials that it has now. What was answered without
        # credentials was for anybody who knows the key. The answer itself may have brought the
        # session cookie that is presented now.
        aliases = tuple(sealed(content, scope, key, "", host))
    return recorded_as(policy, invocation, content, bound, lease, aliases)


def recorded_as(
    policy: Policy,
    invocation: Invocation,
    content: str,
    bound: tuple[str, ...],
    lease: timedelta | None,
    aliases: tuple[str, ...] = (),
) -> Operation:
    """The operation, as it is recorded.

    Args:
        policy: a resolved policy.
        invocation: what is asked for, and by whom.
        content: the digest of what is asked for.
        bound: the scope, the key, and what else must be equal in a retry.
        lease: how long a claim on it lives; ``None``: as long as its transaction.
        aliases: other fingerprints of the same request.
    """
    scope, key, *_ = bound
    fingerprint, *before = sealed(content, *bound)
    return Operation(
        key=key,
        scope=scope if scopes.FITS.fullmatch(scope) else scopes.fit(scope),
        name=invocation.name,
        fingerprint=fingerprint,
        content=content,
        aliases=(*before, *aliases),
        ttl=policy.ttl,
        retention=policy.retention,
        lease=lease,
        hold=policy.on_interrupted == "hold",
        wait=policy.wait_timeout if policy.on_conflict == "wait" else None,
        execute_without_store=policy.on_store_error == "execute",
        count_replays=policy.record_replays,
        extend_on_replay=policy.ttl_from == "last_use",
        principal=invocation.principal,
        method=invocation.method,
        path=invocation.path,
    )


def _no_text(name: str, value: Any) -> ImproperlyConfigured:
    """The error of a callable of the project that returned something else."""
    return ImproperlyConfigured(
        f"The {name} of an idempotency policy returned a {type(value).__name__}, not a text."
    )
