"""The identity of an operation: its key, scope and fingerprint; and its lifetime."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from ..conf import conf, until_settings_change
from ..errors import KeyMalformed, KeyMissing
from ..stores.records import Operation
from . import keys, scopes
from .digests import keyed_digests
from .invocation import Invocation
from .policies import Policy

# The key.


def client_key(policy: Policy, header: str) -> str:
    """The key in the value of the key header.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    key = keys.parse_header(header)
    return key if policy.key_format == "any" else _in_format(policy, key)


def key_of_request(policy: Policy, invocation: Invocation) -> str | None:
    """The key that the policy's ``key`` makes of the invocation, if it makes one.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    key = policy.key(invocation) if policy.key else None
    return None if key is None else _in_format(policy, keys.checked(_text("key", key)))


def refuse_missing(policy: Policy, method: str) -> None:
    """Raise ``KeyMissing`` when a request with this method must bring a key."""
    if policy.requires_key(method):
        raise KeyMissing(_how_to_send_a_key(policy))


def _in_format(policy: Policy, key: str) -> str:
    if policy.key_format == "any" or keys.has_format(key, policy.key_format):
        return key
    raise KeyMalformed(
        "The idempotency key is not in the format that this operation requires: "
        f"{policy.key_format}."
    )


def _how_to_send_a_key(policy: Policy) -> str:
    field = keys.form_field_of(policy.key)
    places = [f"the header {conf.header}"] if keys.reads_header(policy.key) else []
    places += [f"the field {field!r} of its form"] if field else []
    if not places:
        return (
            "This operation makes its idempotency key from fields of the request, and a field is "
            "missing. Send all fields."
        )
    return (
        f"This operation requires {' or '.join(places)}. Send a new, unique key with each "
        "new operation and the same key with each retry of it."
    )


# The operation.


def identified(policy: Policy, invocation: Invocation) -> Invocation:
    """The invocation, with the caller whom the policy knows.

    A policy that returns ``None`` or an empty text does not know: then the request itself decides.
    """
    principal = policy.principal(invocation) if policy.principal else None
    if principal is None or principal == "":
        return invocation
    return invocation.changed(principal=_text("principal", principal), authorization="")


def _name_of(invocation: Invocation) -> str:
    """The name of the caller in the record; keyed, because a header may be a password."""
    if invocation.principal or not invocation.authorization:
        return invocation.principal
    return f"authorization:{keyed_digests('owner', invocation.authorization)[0]}"


def operation(
    policy: Policy,
    invocation: Invocation,
    *,
    key: str,
    lease: timedelta | None = None,
) -> Operation:
    """The operation that a request with this key asks for.

    Args:
        policy: a resolved policy.
        invocation: what is asked for, and by whom.
        key: its key.
        lease: how long a claim on it lives, if it does not live as long as its transaction.
    """
    if policy.operation:
        invocation = invocation.changed(name=policy.operation)
    scope = policy.scope(invocation)
    if not (scope and isinstance(scope, str)):
        _text("scope", scope)
        raise ImproperlyConfigured(
            f"The scope of an idempotency policy is empty for {invocation.name}. Its scope= must "
            "return a namespace for the key."
        )
    asked_for = policy.fingerprint(invocation)
    if not isinstance(asked_for, bytes):
        asked_for = _text("fingerprint", asked_for)
    caller = () if policy.principal is False else (invocation.principal, invocation.authorization)
    return named_operation(
        policy,
        key=key,
        scope=scope,
        name=invocation.name,
        content=asked_for,
        asked_by=(invocation.host, *caller),
        principal=_name_of(invocation),
        method=invocation.method,
        path=invocation.path,
        lease=lease,
    )


def named_fingerprints(key: str, scope: str, content_digest: str) -> tuple[str, ...]:
    """The fingerprint of a call, and after it its former ones."""
    return keyed_digests("fingerprint", content_digest, scope, key)


def named_operation(
    policy: Policy,
    *,
    key: str,
    scope: str,
    name: str,
    content: bytes | str,
    method: str,
    asked_by: tuple[str, ...] = (),
    principal: str = "",
    path: str = "",
    lease: timedelta | None = None,
) -> Operation:
    """The operation that this key names.

    Args:
        policy: a resolved policy.
        key: its key.
        scope: the namespace that the key is unique in.
        name: its name, for people.
        content: what is asked for, or its digest.
        asked_by: what tells callers apart; empty if every caller who knows the key may have it.
        principal: who is calling, for the audit.
        method: the HTTP method, or what stands for it; for the audit.
        path: the path, or what stands for it; for the audit.
        lease: how long a claim on it lives, if it does not live as long as its transaction.
    """
    fingerprint, *former = keyed_digests("fingerprint", content, scope, key, *asked_by)
    return _operation_template(policy)(
        key=key,
        scope=scope if scopes.FITS.fullmatch(scope) else scopes.fit(scope),
        name=name,
        fingerprint=fingerprint,
        former_fingerprints=tuple(former),
        principal=principal,
        method=method,
        path=path,
        lease=lease,
    )


@until_settings_change
@lru_cache(maxsize=1024)
def _operation_template(policy: Policy) -> partial[Operation]:
    """What only its policy decides of an operation, worked out once for each policy."""
    return partial(
        Operation,
        ttl=policy.ttl,
        retention=policy.retention,
        refuse_expired=policy.on_expired == "refuse",
        max_duration=policy.max_duration,
        hold=policy.on_interrupted == "hold",
        wait=_longest_wait(policy),
        count_replays=conf.record_replays,
        extend_on_replay=policy.extend_on_replay,
    )


LONGEST_WAIT: Final = timedelta(seconds=10)
"""The longest wait of ``on_conflict="wait"``."""


def _longest_wait(policy: Policy) -> timedelta | None:
    if isinstance(policy.on_conflict, timedelta):
        return policy.on_conflict
    return LONGEST_WAIT if policy.on_conflict == "wait" else None


def _text(name: str, value: Any) -> str:
    """The result of a callable of the project, if it is a string."""
    if isinstance(value, str):
        return value
    raise ImproperlyConfigured(
        f"The {name} of an idempotency policy returned a {type(value).__name__}, not a string."
    )
