"""Policies: what identifies an operation, and what is kept of its response."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from ..conf import conf, default_store, did_you_mean, is_duration, until_settings_change
from ..stores.records import Record
from . import keys, scopes
from .fingerprints import FingerprintFunction, whole_request
from .keys import KeyFunction
from .scopes import ScopeFunction

UNSAFE_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

NEVER_STORED: Final = frozenset({401, 403, 408, 409, 412, 423, 425, 428, 429})
"""Temporary statuses. A retry may get another one."""

RebuildFunction = Callable[[Record, Any], Any]
CheckFunction = Callable[[Any, Record], None]
ReplayFunction = Callable[[Any, Any], Any]
StoreFunction = Callable[[Any, Any], bool | None]


def store_errors(request: Any, response: Any) -> bool | None:  # noqa: ARG001  # as it is called
    """Store the responses to raised 4xx errors, too: ``Policy(should_store=store_errors)``.

    Statuses that depend on the time of the request are not stored even then.
    """
    status = response.status_code
    return True if status >= 400 and status not in NEVER_STORED else None


@lru_cache(maxsize=64)  # the same policy for each request is equal to itself
def store_only(*statuses: int) -> StoreFunction:
    """Store responses with these statuses only: ``Policy(should_store=store_only(200, 201))``.

    A response with another status rolls back and frees the key, also if the view returned it.

    Args:
        statuses: HTTP statuses below 500. A named one is stored even if it is temporary, or the
            response to an error that the view raised.

    Raises:
        ImproperlyConfigured: a status is not between 200 and 499, or there is none.
    """
    if not statuses or not all(isinstance(each, int) and 200 <= each < 500 for each in statuses):
        raise ImproperlyConfigured(
            f"store_only{statuses!r} needs HTTP statuses from 200 to 499, such as "
            "store_only(200, 201)."
        )
    chosen = frozenset(statuses)

    def stored(request: Any, response: Any) -> bool:  # noqa: ARG001  # as it is called
        return response.status_code in chosen

    return stored


# The checks of a field's value.

_Validator = Callable[[str, Any], Any]


def _refused(name: str, value: Any, expected: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"An idempotency policy has {name}={value!r}; it must be {expected}."
    )


def _valid(expected: str, holds: Callable[[Any], bool]) -> _Validator:
    """Create a check that returns a valid value, and otherwise reports the expected one."""

    def check(name: str, value: Any) -> Any:
        if holds(value):
            return value
        raise _refused(name, value, expected)

    return check


def _or_none(check: _Validator) -> _Validator:
    return lambda name, value: None if value is None else check(name, value)


def _one_of(*choices: str) -> _Validator:
    return _valid(
        " or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices
    )


def _is_plain_function(value: Any) -> bool:
    return callable(value) and not (
        iscoroutinefunction(value) or iscoroutinefunction(type(value).__call__)
    )


# Now plus two of them must still be a date that every database can hold.
_LONGEST: Final = timedelta(days=365 * 1000)
_ON_CONFLICT: Final = ("reject", "wait", "accepted")
_METHODS: Final = f"True, False or a set of methods: {', '.join(sorted(UNSAFE_METHODS))}"

_boolean = _valid("True or False", lambda value: isinstance(value, bool))
_function = _valid("a callable", callable)
_text = _valid("a non-empty string", lambda value: isinstance(value, str) and value != "")
_ttl = _valid(
    "a timedelta above 0 up to 1000 years, or None to replay forever",
    lambda value: value is None or (is_duration(value, _LONGEST) and bool(value)),
)
_retention = _valid(
    "a timedelta from 0 to 1000 years, such as timedelta(hours=24)",
    lambda value: is_duration(value, _LONGEST),
)
_lease = _valid(
    "a timedelta above 0 up to a day, such as timedelta(seconds=30)",
    lambda value: is_duration(value, timedelta(days=1)) and bool(value),
)
_max_duration = _valid(
    "a timedelta above 0, such as timedelta(hours=1), or None for no limit",
    lambda value: value is None or (is_duration(value, _LONGEST) and bool(value)),
)
_on_conflict = _valid(
    "'reject', 'wait', 'accepted' or the timedelta to wait at most",
    lambda value: (
        is_duration(value, _LONGEST) or (isinstance(value, str) and value in _ON_CONFLICT)
    ),
)
_principal = _valid(
    "a callable, None, or False (keys belong to no caller)",
    lambda value: value is None or value is False or callable(value),
)
_check_replay = _valid(
    "None or a plain function that raises to refuse a replay",
    lambda value: value is None or _is_plain_function(value),
)
_on_replay = _valid(
    "None or a plain function of a request and a response that returns a response",
    lambda value: value is None or _is_plain_function(value),
)
_should_store = _valid(
    "None or a plain function of a request and its response",
    lambda value: value is None or _is_plain_function(value),
)
_max_bytes = _valid("a number of bytes, 0 or more", lambda value: type(value) is int and value >= 0)


def _required(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        given = list(value)
        methods = {each.upper() for each in given if isinstance(each, str)}
        if len(methods) == len(given) and methods <= UNSAFE_METHODS:
            return frozenset(methods)
    raise _refused(name, value, _METHODS)


def _key_format(name: str, value: Any) -> Any:
    names = sorted({"any", *keys.FORMAT_NAMES})
    expected = f"{', '.join(names)} or a regular expression"
    try:
        re.compile(_text(name, value))
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(name, value, expected) from error
    if value not in names and value.lower() in names:
        raise _refused(name, value, expected)  # as an expression, it would match only itself
    return value


# The policy.

# ruff: noqa: RUF009  # _field() declares; the class gets no default that could be shared

_Value = TypeVar("_Value")


class _Unset:
    """The value of a field that a policy does not set: the project's policy does."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # a copy is the same object, in another process too


UNSET: Final[Any] = _Unset()


def _comparable(value: Any) -> object:
    """The comparable form of a field's value."""
    try:
        hash(value)
    except TypeError:  # a callable of the project's own kind, which is equal to itself only
        return id(value)
    return value


def _field(default: _Value, validator: _Validator) -> _Value:
    """Declare a field. Its description is the text below it.

    Args:
        default: the field's value if neither the view's policy nor the project's sets it.
        validator: returns the value that the policy keeps, or refuses it.
    """
    metadata = {"default": default, "validator": validator}
    return cast(_Value, dataclasses.field(default=UNSET, metadata=metadata))


class PolicyFields(TypedDict, total=False):
    """The fields of a :class:`Policy` as keyword arguments, for type checkers."""

    required: bool | AbstractSet[str]
    key: KeyFunction | None
    fingerprint: FingerprintFunction
    ttl: timedelta | None
    extend_on_replay: bool
    on_expired: Literal["execute", "refuse"]
    mode: Literal["auto", "transactional", "leased"]
    on_conflict: Literal["reject", "wait", "accepted"] | timedelta
    key_format: str
    scope: ScopeFunction
    principal: KeyFunction | Literal[False] | None
    operation: str | None
    store: str
    retention: timedelta
    should_store: StoreFunction | None
    max_response_bytes: int
    check_replay: CheckFunction | None
    on_replay: ReplayFunction | None
    rebuild: RebuildFunction | None
    lease: timedelta
    max_duration: timedelta | None
    on_interrupted: Literal["resume", "hold"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Policy:
    """The options for identifying a view's operations and storing their responses.

    A field that is not given takes its value from the project's policy, ``IDEMPOTENCY["POLICY"]``.
    A field that this does not set either takes its value from :data:`DEFAULTS`. A policy is
    immutable and may be shared. Policies with the same values are equal, so a policy may be made
    for each request.
    """

    required: bool | AbstractSet[str] = _field(False, _required)
    """``True`` refuses a POST or PATCH without a key (400). A set of methods, such as
    ``{"DELETE"}``, refuses these instead."""

    key: KeyFunction | None = _field(None, _or_none(_function))
    """Derives a key when the client sends none; see :mod:`idempotency_django.policy.keys`."""

    fingerprint: FingerprintFunction = _field(whole_request, _function)
    """The digest that identifies a retry; see
    :mod:`idempotency_django.policy.fingerprints`."""

    ttl: timedelta | None = _field(timedelta(hours=24), _ttl)
    """How long a response is replayed, from when it is stored. ``None`` is forever."""

    extend_on_replay: bool = _field(False, _boolean)
    """Whether ``ttl`` and ``retention`` begin again with each replay."""

    on_expired: Literal["execute", "refuse"] = _field("execute", _one_of("execute", "refuse"))
    """The behaviour after a response has expired. ``"execute"``: the key is new, and the view runs.
    ``"refuse"``: as long as the record is retained, the key is refused (409), and the view does not
    run. A record is retained for its ``retention``, and until it is purged."""

    mode: Literal["auto", "transactional", "leased"] = _field(
        "auto", _one_of("auto", "transactional", "leased")
    )
    """``"transactional"``: claim, effect and response commit together. ``"leased"``: the claim is
    committed first and kept alive, for effects outside the database. ``"auto"``: transactional
    where possible (a store with transactions and a sync view), else leased."""

    on_conflict: Literal["reject", "wait", "accepted"] | timedelta = _field("reject", _on_conflict)
    """The response to a request while its operation is in progress. ``"reject"``: 409 at once.
    ``"wait"``: it waits for the first request to finish, for 10 seconds at most, and then gets 409;
    a ``timedelta`` is another longest wait. ``"accepted"``: 202 and the URL of the operation's
    status."""

    key_format: str = _field("any", _key_format)
    """``"any"``, ``"uuid"``, ``"uuid7"``, ``"ulid"``, ``"opaque"`` (22 URL-safe characters or more)
    or a regular expression that the whole key must match."""

    scope: ScopeFunction = _field(scopes.per_user, _function)
    """The namespace that a key is unique in; see :mod:`idempotency_django.policy.scopes`."""

    principal: KeyFunction | Literal[False] | None = _field(None, _principal)
    """The caller, for a view with its own authentication. A callable that takes an
    :class:`~idempotency_django.policy.invocation.Invocation` and returns a text, such as
    ``"key:17"``, or ``None`` for an unknown caller. A key belongs to the principal of its first
    request or, if no principal is known, to its ``Authorization`` header. Other callers get 422.
    ``False``: a key belongs to no caller."""

    operation: str | None = _field(None, _or_none(_text))
    """A name of your own for the operation, instead of its method and route. Keys then stay valid
    when the URL changes."""

    store: str = _field("default", _text)
    """The alias of the store in ``IDEMPOTENCY["STORES"]``. If no policy names a store, it is the
    only one in the setting, or else the one called ``"default"``."""

    retention: timedelta = _field(timedelta(0), _retention)
    """How long an expired record is kept before it can be purged."""

    should_store: StoreFunction | None = _field(None, _should_store)
    """Called with Django's request and a response below 500; returns whether to store the response.
    If not, the attempt rolls back and frees the key. A response to an error that the view raised is
    stored after the rollback, and only for ``True``. ``None``, also as its result: store the view's
    response, except temporary statuses (401, 403, 408, 409, 412, 423, 425, 428, 429) and a page
    whose context contains a form with errors.
    """

    max_response_bytes: int = _field(1024 * 1024, _max_bytes)
    """A longer body is not stored. A retry is then not executed and gets 409, or the response of
    ``rebuild``. ``0``: no body is stored.
    """

    check_replay: CheckFunction | None = _field(None, _check_replay)
    """Called with the request and the record before each replay. It refuses the replay by raising
    ``PermissionDenied``, ``Http404`` or an exception of REST framework. Use it for permissions that
    only the view checks, such as an API key in the body. It must be a plain function; for an async
    view, it runs in a thread."""

    on_replay: ReplayFunction | None = _field(None, _on_replay)
    """Called with Django's request and each response that is a replay; returns the response to
    send, for example with a refreshed header. The record stays as it is. It must be a plain
    function; for an async view, it runs in a thread."""

    rebuild: RebuildFunction | None = _field(None, _or_none(_function))
    """Called with the record and the request if the body was not stored; returns the response."""

    lease: timedelta = _field(timedelta(seconds=30), _lease)
    """How long a leased claim outlives its owner. It is renewed while the view runs, so it may be
    shorter than the view takes."""

    max_duration: timedelta | None = _field(timedelta(hours=1), _max_duration)
    """How long the lease is renewed while the view runs. ``None`` sets no limit. A view that
    hangs would keep its key forever. After this time, an error is logged, and the attempt counts
    as interrupted when its lease ends, even if the view still runs."""

    on_interrupted: Literal["resume", "hold"] = _field("resume", _one_of("resume", "hold"))
    """The behaviour after an attempt was interrupted and its effects are unknown. ``"resume"``: a
    retry resumes the operation. ``"hold"``: retries get 409 until an operator completes or releases
    the operation in the admin. A leased attempt is interrupted by a crash, a transactional one only
    if something ended its transaction.
    """

    _identity: tuple[int, object] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, declared in FIELDS.items():
            value = getattr(self, name)
            if value is not UNSET:
                object.__setattr__(self, name, declared.metadata["validator"](name, value))
        values = tuple(_comparable(getattr(self, name)) for name in FIELDS)
        object.__setattr__(self, "_identity", (hash(values), values))  # each request asks for it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._identity[0]

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self._given().items()]
        return f"Policy({', '.join(given)})"

    def __reduce__(self) -> Any:
        return partial(Policy, **self._given()), ()

    def _given(self) -> dict[str, Any]:
        """The fields that this policy sets itself."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: value for name, value in values.items() if value is not UNSET}

    def replace(self, **changes: Unpack[PolicyFields]) -> Policy:
        """The same policy with some fields changed.

        Raises:
            TypeError: a policy has no field of this name.
        """
        for name in changes:
            if name not in FIELDS:
                raise TypeError(f"A policy has no field {name!r}. {did_you_mean(name, FIELDS)}")
        return Policy(**{**self._given(), **changes})

    def over(self, base: Policy) -> Policy:
        """This policy, with unset fields taken from ``base``."""
        given = {**base._given(), **self._given()}
        return Policy(**given)

    @until_settings_change
    @lru_cache(maxsize=1024)  # noqa: B019  # one result for all policies with the same values
    def resolved(self) -> Policy:
        """This policy, with unset fields taken from the project's policy and the defaults."""
        return self.over(_project_policy().over(DEFAULTS.replace(store=default_store())))

    def requires_key(self, method: str) -> bool:
        """Whether a request with this method must bring a key."""
        if isinstance(self.required, bool):
            return self.required and method in ("POST", "PATCH")
        return method in self.required


FIELDS: Final = {
    declared.name: declared for declared in dataclasses.fields(Policy) if declared.init
}

DEFAULTS: Final = Policy(**{name: field.metadata["default"] for name, field in FIELDS.items()})
"""The default values of all fields."""

INHERITED: Final = Policy()
"""It sets no field, so all are the project's: for views and calls without a policy of their own."""

PAYMENT: Final = Policy(mode="leased", required=True, ttl=timedelta(days=30))
"""For payments at a provider, in steps. The key is required, and lives as long as a settlement."""


def _project_policy() -> Policy:
    """The project's policy, from ``IDEMPOTENCY["POLICY"]``."""
    setting = conf.policy
    if isinstance(setting, Mapping):
        unknown = [
            f"has no field {name!r}. {did_you_mean(name, FIELDS)}"
            for name in setting
            if name not in FIELDS
        ]
        if unknown:
            raise ImproperlyConfigured(f"IDEMPOTENCY['POLICY'] {' It '.join(unknown)}")
        setting = Policy(**setting)
    if not isinstance(setting, Policy):
        raise ImproperlyConfigured(
            "IDEMPOTENCY['POLICY'] must be a dict of policy fields or a Policy, "
            f"not {type(setting).__name__}."
        )
    return setting
