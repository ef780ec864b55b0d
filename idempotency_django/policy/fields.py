"""The fields of a policy, each declared once: its type, default, validator and description."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from ..records import Record
from . import keys, scopes
from .fingerprints import FingerprintFunction, whole_request
from .keys import KeyFunction
from .scopes import ScopeFunction

Validator = Callable[[str, Any], Any]

UNSAFE_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def byte_count(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _wrong(name, value, "a number of bytes, 0 or more")


# Now plus two of them must still be a date that every database can hold.
_LONGEST: Final = timedelta(days=365 * 1000)


def duration(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) <= value <= _LONGEST:
        return value
    raise _wrong(name, value, "a timedelta from 0 to 1000 years, such as timedelta(hours=24)")


def ttl(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to 1000 years, or None to replay forever")


def lease(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) < value <= timedelta(days=1):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to a day, such as timedelta(seconds=30)")


def flag(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "True or False")


def function(name: str, value: Any) -> Any:
    if callable(value):
        return value
    raise _wrong(name, value, "a callable")


def optional_callable(name: str, value: Any) -> Any:
    return value if value is None else function(name, value)


def check_replay(name: str, value: Any) -> Any:
    if value is None or (callable(value) and not _is_async(value)):
        return value
    raise _wrong(name, value, "None or a plain function, which refuses a replay by raising")


def _is_async(value: Any) -> bool:
    return iscoroutinefunction(value) or iscoroutinefunction(type(value).__call__)


def text(name: str, value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    raise _wrong(name, value, "a text that is not empty")


def optional_text(name: str, value: Any) -> Any:
    return value if value is None else text(name, value)


def key_format(name: str, value: Any) -> Any:
    names = sorted({"any", *keys.FORMAT_NAMES})
    expected = f"{', '.join(names)} or a regular expression"
    try:
        re.compile(text(name, value))
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(name, value, expected) from error
    if value not in names and value.lower() in names:
        raise _wrong(name, value, expected)  # as an expression, it would match only itself
    return value


def one_of(*choices: str) -> Validator:
    def chosen(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        raise _wrong(name, value, " or ".join(map(repr, choices)))

    return chosen


def set_of(kind: type, expected: str) -> Validator:
    def frozen(name: str, value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            items = list(value)
            if all(isinstance(item, kind) for item in items):
                return frozenset(items)
        raise _wrong(name, value, expected)

    return frozen


_METHODS: Final = f"a set of methods: {', '.join(sorted(UNSAFE_METHODS))}"


def methods(name: str, value: Any, expected: str = _METHODS) -> Any:
    names = frozenset(method.upper() for method in set_of(str, expected)(name, value))
    if names <= UNSAFE_METHODS:
        return names
    raise _wrong(name, value, expected)


def required(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else methods(name, value, f"True, False or {_METHODS}")


def statuses(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and all(
        isinstance(status, int) and 100 <= status <= 599
        for pair in value.items()
        for status in pair
    ):
        return MappingProxyType(dict(value))
    raise _wrong(name, value, "a dict of status codes, such as {201: 200}")


def _wrong(name: str, value: Any, expected: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"An idempotency policy has {name}={value!r}; it must be {expected}."
    )


# ruff: noqa: RUF009  # field() declares; the class gets no default that could be shared


NEVER_STORED: Final = frozenset({401, 403, 408, 409, 412, 423, 425, 428, 429})
"""Statuses that depend on the time of the request: a retry may get another one."""

RebuildFunction = Callable[[Record, Any], Any]
CheckFunction = Callable[[Any, Record], None]
StoresFunction = Callable[[Any, Any], bool]

_Value = TypeVar("_Value")


class _Unset:
    """The value of a field that a policy does not set: the project's policy does."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # a copy is the same object, in another process too


UNSET: Final[Any] = _Unset()


class Group(Enum):
    """The part of the reference that describes a field."""

    FIRST = "first"
    IDENTITY = "identity"
    KEPT = "kept"
    DUPLICATES = "duplicates"
    LEASES = "leases"
    LIMITS = "limits"


def field(default: _Value, validator: Validator, group: Group) -> _Value:
    """Declare a field. Its description is the text below it.

    Args:
        default: the field's value if neither the view's policy nor the project's sets it.
        validator: returns the value that the policy keeps, or refuses it.
        group: where the reference describes the field.
    """
    metadata = {"default": default, "validator": validator, "group": group}
    return cast(_Value, dataclasses.field(default=UNSET, metadata=metadata))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyFields:
    """What a policy can say. A new field needs its declaration here, and nothing elsewhere."""

    required: bool | frozenset[str] = field(False, required, Group.FIRST)
    """``True`` refuses a POST or PATCH without a key (400). A set of methods, such as
    ``{"DELETE"}``, refuses these instead."""

    key: KeyFunction | None = field(None, optional_callable, Group.FIRST)
    """Derives a key when the client sends none; see :mod:`idempotency_django.policy.keys`."""

    fingerprint: FingerprintFunction = field(whole_request, function, Group.FIRST)
    """What tells a retry from another request; see
    :mod:`idempotency_django.policy.fingerprints`."""

    ttl: timedelta | None = field(timedelta(hours=24), ttl, Group.FIRST)
    """How long an answer is replayed; ``None``: forever."""

    mode: Literal["auto", "transactional", "leased"] = field(
        "auto", one_of("auto", "transactional", "leased"), Group.FIRST
    )
    """``"transactional"``: claim, effect and answer are one transaction. ``"leased"``: the claim is
    committed first and kept alive, for effects outside the database. ``"auto"``: transactional
    where possible (a store with transactions and a sync view), else leased."""

    on_conflict: Literal["reject", "wait", "accepted"] = field(
        "reject", one_of("reject", "wait", "accepted"), Group.FIRST
    )
    """What a request gets while its operation is in progress. ``"reject"``: 409 at once.
    ``"wait"``: it waits for the first request to finish. ``"accepted"``: 202 and the URL of the
    operation's status."""

    methods: frozenset[str] = field(UNSAFE_METHODS, methods, Group.IDENTITY)
    """The methods that are protected; safe methods never are."""

    client_key: bool = field(True, flag, Group.IDENTITY)
    """Whether the client's key header counts. ``False``: only derived keys do."""

    key_format: str = field("any", key_format, Group.IDENTITY)
    """``"any"``, ``"uuid"``, ``"ulid"``, ``"opaque"`` (22 URL-safe characters or more) or a regular
    expression that the whole key must match."""

    scope: ScopeFunction = field(scopes.per_user, function, Group.IDENTITY)
    """The namespace that a key is unique in; see :mod:`idempotency_django.policy.scopes`."""

    principal: KeyFunction | None = field(None, optional_callable, Group.IDENTITY)
    """Who is calling, for a view that authenticates its callers itself. A callable that takes an
    :class:`~idempotency_django.policy.invocation.Invocation` and returns a text, such as
    ``"key:17"``, or ``None`` for a caller that it does not know."""

    bind_principal: bool = field(True, flag, Group.IDENTITY)
    """Whether a key belongs to the principal who used it first or, if no principal is known, to the
    credentials of the first request. Other callers get 422."""

    hosts: Literal["refuse", "separate", "same"] = field(
        "refuse", one_of("refuse", "separate", "same"), Group.IDENTITY
    )
    """``"refuse"``: a key that was used on another host gets 422. ``"separate"``: each host has
    keys of its own. ``"same"``: all hosts are names of one API."""

    operation: str | None = field(None, optional_text, Group.IDENTITY)
    """A name of your own for the operation, instead of its method and route. Keys then stay valid
    when the URL changes."""

    store: str = field("default", text, Group.KEPT)
    """The alias of the store in ``IDEMPOTENCY["STORES"]``. If no policy names a store, it is the
    only one in the setting, or else the one called ``"default"``."""

    ttl_from: Literal["creation", "last_use"] = field(
        "creation", one_of("creation", "last_use"), Group.KEPT
    )
    """What ``ttl`` counts from: ``"creation"`` or ``"last_use"``."""

    retention: timedelta = field(timedelta(0), duration, Group.KEPT)
    """How long an expired record is kept for the audit before it may be purged."""

    store_errors: bool = field(False, flag, Group.KEPT)
    """Whether the answers of raised 4xx errors are stored too, after their rollback."""

    never_store: frozenset[int] = field(
        NEVER_STORED, set_of(int, "a set of status codes"), Group.KEPT
    )
    """Statuses that roll back and free the key, as a 5xx does."""

    stores: StoresFunction | None = field(None, optional_callable, Group.KEPT)
    """Called with Django's request and the response; returns whether to store the answer. If not,
    the attempt rolls back and frees the key. ``None``: store every answer except a page whose
    context contains a form with errors."""

    store_body: bool = field(True, flag, Group.KEPT)
    """Whether bodies are kept at all. If not, give ``rebuild``."""

    exclude_headers: frozenset[str] = field(
        frozenset(), set_of(str, "a set of header names"), Group.KEPT
    )
    """Response headers that are not kept, in addition to those that never are."""

    check_replay: CheckFunction | None = field(None, check_replay, Group.DUPLICATES)
    """Called with the request and the record before each replay. It refuses the replay by raising
    ``PermissionDenied``, ``Http404`` or an exception of REST framework. Use it for what only the
    view knows, such as an API key in the body. It must be a plain function; for an async view, it
    runs in a thread."""

    replay_status: Mapping[int, int] = field({}, statuses, Group.DUPLICATES)
    """The status of a replay by the status of the first answer, for example ``{201: 200}``."""

    rebuild: RebuildFunction | None = field(None, optional_callable, Group.DUPLICATES)
    """Called with the record and the request if the body was not kept; returns the response."""

    record_replays: bool = field(True, flag, Group.DUPLICATES)
    """Whether replays are counted in the record, with one more statement each."""

    retry_after: timedelta = field(timedelta(seconds=1), duration, Group.DUPLICATES)
    """The ``Retry-After`` of the 409 while the operation is in progress."""

    lease: timedelta = field(timedelta(seconds=30), lease, Group.LEASES)
    """How long a leased claim outlives its owner. It is renewed while the view runs, so it may be
    shorter than the view takes."""

    on_interrupted: Literal["resume", "hold"] = field(
        "resume", one_of("resume", "hold"), Group.LEASES
    )
    """What happens after an attempt was interrupted, when nobody knows what it did. ``"resume"``: a
    retry resumes the operation. ``"hold"``: retries get 409 until an operator settles the operation
    in the admin. A leased attempt is interrupted by a crash, a transactional one only if something
    ended its transaction."""

    on_store_error: Literal["refuse", "execute"] = field(
        "refuse", one_of("refuse", "execute"), Group.LEASES
    )
    """What happens while the store of a leased operation cannot be reached. ``"refuse"``: requests
    get 503. ``"execute"``: the view runs without protection, and an error is logged."""

    wait_timeout: timedelta = field(timedelta(seconds=10), duration, Group.LIMITS)
    """The longest wait of ``on_conflict="wait"``; after it, the request gets 409."""

    max_response_bytes: int = field(1024 * 1024, byte_count, Group.LIMITS)
    """A longer body is not kept. A retry is then not executed and gets 409."""

    def __post_init__(self) -> None:
        for declared in FIELDS.values():
            value = getattr(self, declared.name)
            if value is not UNSET:
                value = declared.metadata["validator"](declared.name, value)
                object.__setattr__(self, declared.name, value)


FIELDS: Final = {declared.name: declared for declared in dataclasses.fields(PolicyFields)}
