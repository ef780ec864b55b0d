"""The identity of an operation: its key, scope and fingerprint; and its lifetime."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.utils.dateparse import parse_datetime
from django.utils.http import parse_http_date

from ..conf import conf, until_settings_change
from ..errors import KeyMalformed, KeyMissing, KeyTooOld
from ..stores.records import Operation
from . import Policy, SlidingTTL, dialect_of, keys, scopes
from .canonical import content_digest, framed
from .dialects import Dialect
from .fingerprints import every_value, field_value, is_json
from .invocation import Invocation
from .seals import sealed

# The key.


def client_key(policy: Policy, header: str | None) -> str | None:
    """The key in the value of the key header; ``None`` if the header does not count.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    if header is None or not keys.reads_header(policy.key):
        return None
    return _in_format(policy, _short_enough(policy, keys.parse_header(header)))


def key_in_body(policy: Policy, invocation: Invocation, key: str | None) -> str | None:
    """The key that the body of a request holds, or the one in its header.

    Args:
        policy: a resolved policy, whose dialect names the members of the body.
        invocation: the request.
        key: the key in its header; ``None``: it has none.

    Raises:
        KeyMalformed: it is not a key, or another key than the header or another member holds. Or
            the body cannot be read, and there is no key in the header.
    """
    if not may_hold_key(invocation.media_type):
        return key
    header = f"the header {header_of(dialect_of(policy))}"
    values = every_value(invocation, dialect_of(policy).members)
    if values is None and key is None:
        raise KeyMalformed(
            f"The body cannot be read as {invocation.media_type}, so it is not known whether it "
            f"has an idempotency key, and nothing was executed. Correct the body, or send the key "
            f"in {header}."
        )
    found = [] if key is None else [(header, key)]
    for member, value in values or ():
        if value is None:
            continue
        if not isinstance(value, str):
            raise KeyMalformed(f"The idempotency key in {member!r} is not a string. Send a string.")
        sent = _in_format(policy, _short_enough(policy, keys.checked(value)))
        found.append((f"{member!r} of the body", sent))
    if len({sent for _, sent in found}) > 1:
        places = " and ".join(dict.fromkeys(place for place, _ in found))
        raise KeyMalformed(
            f"The request has different idempotency keys in {places}, so nothing was executed. "
            "Send one key."
        )
    return found[0][1] if found else None


def may_hold_key(media_type: str) -> bool:
    """Whether a body of this media type may hold a key: JSON, or a form without files."""
    return is_json(media_type) or media_type == "application/x-www-form-urlencoded"


def header_of(dialect: Dialect) -> str:
    """The request header with the key."""
    return conf.header if dialect.header is None else dialect.header


# The time of a key.

CLOCK_SKEW: Final = timedelta(minutes=5)
"""How far a client's clock may be ahead of a server's, and the clocks of two servers apart."""


def sent_at(policy: Policy, key: str, header: str | None, invocation: Invocation) -> float | None:
    """When a client made a key or sent its request first, in seconds since 1970, if it says so.

    Args:
        policy: a resolved policy.
        key: the key.
        header: the value of the dialect's ``sent_header``.
        invocation: the request.

    Raises:
        KeyMalformed: it is not a time.
    """
    dialect = dialect_of(policy)
    try:
        if header is not None:
            return float(parse_http_date(header))
        text = field_value(invocation, dialect.sent_member) if dialect.sent_member else None
        if text is None:
            return keys.time_of(key, policy.key_format)
        parsed = parse_datetime(text) if isinstance(text, str) else None
        if parsed is None or parsed.tzinfo is None:
            raise ValueError
        return parsed.timestamp()
    except (ValueError, OverflowError):
        name, form = dialect.sent_member, "2026-11-23T06:25:00Z"
        if header is not None:
            name, form = dialect.sent_header, "Mon, 23 Nov 2026 06:25:00 GMT"
        raise KeyMalformed(
            f"{name} is not the time at which the request was first sent. Send a time such as "
            f"{form}."
        ) from None


def refuse_too_old(policy: Policy, sent: float) -> None:
    """Refuse a key whose record may be purged, and one that would outlive its record.

    The clock is this server's. Records of such keys live longer by what the clocks may differ, so
    a key is refused for its age before its record can expire.

    Args:
        policy: a resolved policy.
        sent: when the key was made, in seconds since 1970.

    Raises:
        KeyTooOld: it is older than the policy's ``ttl``.
        KeyMalformed: its time is in the future.
    """
    age = datetime.now(UTC).timestamp() - sent
    if policy.ttl is not None and age > policy.ttl.total_seconds():
        raise KeyTooOld
    if age < -CLOCK_SKEW.total_seconds():
        raise KeyMalformed(
            "The time of this idempotency key is in the future. Set the clock of the client, and "
            "send a new key."
        )


def carries_time(policy: Policy) -> bool:
    """Whether a key, or its request, may say when it was made."""
    dialect = dialect_of(policy)
    named = dialect.sent_header or dialect.sent_member
    return bool(named) or policy.key_format in keys.TIMED


def lifetime_of(policy: Policy) -> timedelta | None:
    """How long a record lives: longer than its key may be sent, if the key carries its time."""
    if policy.ttl is None or not carries_time(policy):
        return policy.ttl
    # A key from 5 minutes in the future, and a server whose clock is 5 minutes slow.
    return policy.ttl + 2 * CLOCK_SKEW


def derived_key(policy: Policy, invocation: Invocation) -> str | None:
    """The key that is derived from the invocation, if there is one.

    Raises:
        KeyMalformed: it is not a key, or not in the policy's format.
    """
    derived = policy.key(invocation) if policy.key else None
    if derived is None:
        return None
    key = keys.checked(_text("key", derived))
    return key if _is_of_dialect(policy, "key_format") else _in_format(policy, key)


def _is_of_dialect(policy: Policy, field: str) -> bool:
    """Whether the dialect has set a field: for the keys that clients send, not for derived ones."""
    return bool(getattr(policy, field) == dialect_of(policy).defaults.get(field))


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


def _short_enough(policy: Policy, key: str) -> str:
    """The key of a client, if it is not longer than the dialect allows."""
    return keys.short_enough(key, dialect_of(policy).max_length)


def _how_to_send_a_key(policy: Policy) -> str:
    field = getattr(policy.key, keys.FIELD_OF_FORM, None)
    dialect = dialect_of(policy)
    places = []
    if keys.reads_header(policy.key):
        names = " and ".join(filter(None, (header_of(dialect), dialect.sent_header)))
        places = [f"{member!r} in its body" for member in dialect.members]
        places.append(f"the header {names}")
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
    """The invocation, with the principal that the policy knows it to be from."""
    principal = policy.principal(invocation) if policy.principal else None
    if principal is None:
        return invocation
    return invocation.changed(principal=_text("principal", principal), authorization="")


def operation(
    policy: Policy,
    invocation: Invocation,
    *,
    key: str,
    scope: str | None = None,
    lease: timedelta | None = None,
    sent: str = "",
    derived: bool = False,
) -> Operation:
    """The operation that an invocation with this key asks for.

    Args:
        policy: a resolved policy.
        invocation: what is asked for, and by whom.
        key: its key.
        scope: overrides the policy's scope.
        lease: how long a claim on it lives; ``None``: as long as its transaction.
        sent: when the client sent it first, as its header says; another time is another request.
        derived: whether the client has not sent the key.
    """
    if policy.operation:
        invocation = invocation.changed(name=policy.operation)
    scope = _scope(policy, invocation, scope, derived=derived)
    asked_for = policy.fingerprint(invocation)
    if not isinstance(asked_for, bytes):
        asked_for = _text("fingerprint", asked_for)
    digest = content_digest(asked_for, sent) if sent else content_digest(asked_for)
    caller = () if policy.principal is False else (invocation.principal, invocation.authorization)
    aliases = sealed(digest, framed(digest, scope, key, invocation.host, *caller))
    fingerprint, content = next(iter(aliases.items()))
    return _operations(policy)(
        key=key,
        scope=scope if scopes.FITS.fullmatch(scope) else scopes.fit(scope),
        name=invocation.name,
        fingerprint=fingerprint,
        content=content,
        aliases=aliases,
        lease=lease,
        principal=invocation.principal,
        method=invocation.method,
        path=invocation.path,
    )


def _scope(
    policy: Policy, invocation: Invocation, scope: str | None, *, derived: bool = False
) -> str:
    if scope is None:
        of_clients = derived and _is_of_dialect(policy, "scope")
        scope = scopes.per_user(invocation) if of_clients else policy.scope(invocation)
    if not (scope and isinstance(scope, str)):
        _text("scope", scope)
        raise ImproperlyConfigured(
            f"The scope of an idempotency policy is empty for {invocation.name}. Its scope= "
            "must return a namespace for the key, or the view's get_idempotency_scope() if it has "
            "one."
        )
    return scope


def named_fingerprints(key: str, scope: str, content: str) -> dict[str, str]:
    """The fingerprints of a :func:`named_operation`; see :func:`~.seals.sealed`."""
    return sealed(content, framed(content, scope, key))


def named_operation(
    policy: Policy,
    *,
    key: str,
    scope: str,
    name: str,
    content: str,
    method: str,
    lease: timedelta | None = None,
) -> Operation:
    """The operation that a call names itself, for every caller who knows the key.

    Args:
        policy: a resolved policy.
        key: its key.
        scope: the namespace that the key is unique in.
        name: its name.
        content: the digest of what is asked for.
        method: what stands for the HTTP method in the audit.
        lease: how long a claim on it lives; ``None``: as long as its transaction.
    """
    aliases = named_fingerprints(key, scope, content)
    fingerprint, derivable = next(iter(aliases.items()))
    return _operations(policy)(
        key=key,
        scope=scope if scopes.FITS.fullmatch(scope) else scopes.fit(scope),
        name=name,
        fingerprint=fingerprint,
        content=derivable,
        aliases=aliases,
        lease=lease,
        method=method,
    )


@until_settings_change
@lru_cache(maxsize=1024)
def _operations(policy: Policy) -> partial[Operation]:
    """Operations with what only their policy decides, worked out once for each policy."""
    return partial(
        Operation,
        ttl=lifetime_of(policy),
        retention=policy.retention,
        reserved=policy.reserved,
        hold=policy.on_interrupted == "hold",
        wait=_longest_wait(policy),
        count_replays=conf.record_replays,
        extend_on_replay=isinstance(policy.ttl, SlidingTTL),
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
