"""Policies: what identifies an operation, and what is kept of its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal

from django.core.exceptions import ImproperlyConfigured

from ..conf import conf, default_store, did_you_mean
from ..records import Record
from . import scopes
from .fingerprints import FingerprintFunction, whole_request
from .keys import KeyFunction
from .scopes import ScopeFunction
from .validators import UNSAFE_METHODS, validated

NEVER_STORED: Final = frozenset({401, 403, 408, 409, 412, 423, 425, 428, 429})
"""Statuses that depend on the time of the request: a retry may get another one."""

RebuildFunction = Callable[[Record, Any], Any]
CheckFunction = Callable[[Any, Record], None]
StoresFunction = Callable[[Any, Any], bool]


class _Unset:
    """The value of a field that a policy does not set: the project's policy does."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # a copy is the same object, in another process too


UNSET: Final[Any] = _Unset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """How the operations of a view are identified, and what is kept of their answers.

    A field that is not given takes its value from the project's policy, ``IDEMPOTENCY["POLICY"]``.
    A field that this does not set either takes its value from :data:`DEFAULTS`. A policy is
    immutable and may be shared.

    Attributes:
        store: the alias of the store in ``IDEMPOTENCY["STORES"]``. If no policy names a store, it
            is the only one in the setting, or else the one called ``"default"``.
        required: ``True`` refuses a POST or PATCH without a key (400). A set of methods, such as
            ``{"DELETE"}``, refuses these instead.
        methods: the methods that are protected; safe methods never are.
        client_key: whether the client's key header counts. ``False``: only derived keys do.
        key: derives a key when the client sends none; see :mod:`idempotency_django.policy.keys`.
        key_format: ``"any"``, ``"uuid"``, ``"ulid"``, ``"opaque"`` (22 URL-safe characters or
            more) or a regular expression that the whole key must match.
        scope: the namespace that a key is unique in; see :mod:`idempotency_django.policy.scopes`.
        principal: who is calling, for a view that authenticates its callers itself. A callable that
            takes an :class:`~idempotency_django.policy.invocation.Invocation` and returns a text,
            such as ``"key:17"``, or ``None`` for a caller that it does not know.
        bind_principal: whether a key belongs to the principal who used it first or, if no principal
            is known, to the credentials of the first request. Other callers get 422.
        hosts: ``"refuse"``: a key that was used on another host gets 422. ``"separate"``: each host
            has keys of its own. ``"same"``: all hosts are names of one API.
        operation: a name of your own for the operation, instead of its method and route. Keys then
            stay valid when the URL changes.
        fingerprint: what tells a retry from another request; see
            :mod:`idempotency_django.policy.fingerprints`.
        ttl: how long an answer is replayed; ``None``: forever.
        ttl_from: what ``ttl`` counts from: ``"creation"`` or ``"last_use"``.
        retention: how long an expired record is kept for the audit before it may be purged.
        mode: ``"transactional"``: claim, effect and answer are one transaction. ``"leased"``: the
            claim is committed first and kept alive, for effects outside the database. ``"auto"``:
            transactional where possible (a store with transactions and a sync view), else leased.
        lease: how long a leased claim outlives its owner. It is renewed while the view runs, so it
            may be shorter than the view takes.
        on_interrupted: what happens after an attempt was interrupted, when nobody knows what it
            did. ``"resume"``: a retry resumes the operation. ``"hold"``: retries get 409 until an
            operator settles the operation in the admin. A leased attempt is interrupted by a crash,
            a transactional one only if something ended its transaction.
        on_conflict: what a request gets while its operation is in progress. ``"reject"``: 409 at
            once. ``"wait"``: it waits for the first request to finish. ``"accepted"``: 202 and the
            URL of the operation's status.
        wait_timeout: the longest such wait; after it, the request gets 409.
        retry_after: the ``Retry-After`` of the 409.
        on_store_error: what happens while the store of a leased operation cannot be reached.
            ``"refuse"``: requests get 503. ``"execute"``: the view runs without protection, and an
            error is logged.
        store_errors: whether the answers of raised 4xx errors are stored too, after their rollback.
        never_store: statuses that roll back and free the key, as a 5xx does.
        stores: called with Django's request and the response; returns whether to store the answer.
            If not, the attempt rolls back and frees the key. ``None``: store every answer except a
            page whose context contains a form with errors.
        max_response_bytes: a longer body is not kept. A retry is then not executed and gets 409.
        store_body: whether bodies are kept at all. If not, give ``rebuild``.
        exclude_headers: response headers that are not kept, in addition to those that never are.
        replay_status: the status of a replay by the status of the first answer, for example
            ``{201: 200}``.
        rebuild: called with the record and the request if the body was not kept; returns the
            response.
        check_replay: called with the request and the record before each replay. It refuses the
            replay by raising ``PermissionDenied``, ``Http404`` or an exception of REST framework.
            Use it for what only the view knows, such as an API key in the body. It must be a plain
            function; for an async view, it runs in a thread.
        record_replays: whether replays are counted in the record, with one more statement each.
    """

    store: str = UNSET
    required: bool | frozenset[str] = UNSET
    methods: frozenset[str] = UNSET
    client_key: bool = UNSET
    key: KeyFunction | None = UNSET
    key_format: str = UNSET
    scope: ScopeFunction = UNSET
    principal: KeyFunction | None = UNSET
    bind_principal: bool = UNSET
    hosts: Literal["refuse", "separate", "same"] = UNSET
    operation: str | None = UNSET
    fingerprint: FingerprintFunction = UNSET
    ttl: timedelta | None = UNSET
    ttl_from: Literal["creation", "last_use"] = UNSET
    retention: timedelta = UNSET
    mode: Literal["auto", "transactional", "leased"] = UNSET
    lease: timedelta = UNSET
    on_interrupted: Literal["resume", "hold"] = UNSET
    on_conflict: Literal["reject", "wait", "accepted"] = UNSET
    wait_timeout: timedelta = UNSET
    retry_after: timedelta = UNSET
    on_store_error: Literal["refuse", "execute"] = UNSET
    store_errors: bool = UNSET
    never_store: frozenset[int] = UNSET
    stores: StoresFunction | None = UNSET
    max_response_bytes: int = UNSET
    store_body: bool = UNSET
    exclude_headers: frozenset[str] = UNSET
    replay_status: Mapping[int, int] = UNSET
    rebuild: RebuildFunction | None = UNSET
    check_replay: CheckFunction | None = UNSET
    record_replays: bool = UNSET

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not UNSET:
                object.__setattr__(self, name, validated(name, value))

    def replace(self, **changes: Any) -> Policy:
        """The same policy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def over(self, base: Policy) -> Policy:
        """This policy, with unset fields taken from ``base``."""
        given = {name: getattr(self, name) for name in _FIELDS}
        return dataclasses.replace(base, **{k: v for k, v in given.items() if v is not UNSET})

    def resolved(self) -> Policy:
        """This policy, with unset fields taken from the project's policy and the defaults."""
        return _resolved(self, _project.policy(), default_store())

    def requires_key(self, method: str) -> bool:
        """Whether a request with this method must bring a key."""
        if isinstance(self.required, bool):
            return self.required and method in ("POST", "PATCH")
        return method in self.required

    def keeps(self, status: int) -> bool:
        """Whether an answer with this status that the handler returned is stored and committed."""
        return status < 500 and status not in self.never_store

    def keeps_raised(self, status: int) -> bool:
        """Whether the answer to an error that the handler raised is stored after the rollback."""
        return self.store_errors and status >= 400 and self.keeps(status)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Policy))


DEFAULTS: Final = Policy(
    store="default",
    required=False,
    methods=UNSAFE_METHODS,
    client_key=True,
    key=None,
    key_format="any",
    scope=scopes.per_user,
    principal=None,
    bind_principal=True,
    hosts="refuse",
    operation=None,
    fingerprint=whole_request,
    ttl=timedelta(hours=24),
    ttl_from="creation",
    retention=timedelta(0),
    mode="auto",
    lease=timedelta(seconds=30),
    on_interrupted="resume",
    on_conflict="reject",
    wait_timeout=timedelta(seconds=10),
    retry_after=timedelta(seconds=1),
    on_store_error="refuse",
    store_errors=False,
    never_store=NEVER_STORED,
    stores=None,
    max_response_bytes=1024 * 1024,
    store_body=True,
    exclude_headers=frozenset(),
    replay_status={},
    rebuild=None,
    check_replay=None,
    record_replays=True,
)
"""The values of fields that neither the view's policy nor the project's policy sets."""

PROJECTS: Final = Policy()
"""The project's policy, where a view or a call has none of its own; made once, as it is cached."""

API: Final = Policy(ttl=timedelta(hours=24))
"""For an API: clients retry within a day."""

WEBHOOK: Final = Policy(ttl=timedelta(days=7))
"""For receiving webhooks: senders deliver again for some days."""

PAYMENT: Final = Policy(ttl=timedelta(days=30), required=True)
"""For payments: the key is required, and lives as long as a settlement takes."""


def _project_policy(setting: Any) -> Policy:
    """The project's policy, from ``IDEMPOTENCY["POLICY"]``."""
    if isinstance(setting, Policy):
        return setting
    if not isinstance(setting, Mapping):
        raise ImproperlyConfigured(
            "IDEMPOTENCY['POLICY'] must be a dict of policy fields or a Policy, "
            f"not {type(setting).__name__}."
        )
    unknown = [
        f"has no field {name!r}. {did_you_mean(name, _FIELDS)}"
        for name in setting
        if name not in _FIELDS
    ]
    if unknown:
        raise ImproperlyConfigured(f"IDEMPOTENCY['POLICY'] {' It '.join(unknown)}")
    return Policy(**setting)


class _Project:
    """The project's policy, made again when the setting is another object than before."""

    def __init__(self) -> None:
        self._made: tuple[Any, Policy] | None = None

    def policy(self) -> Policy:
        setting = conf.policy
        if self._made is None or self._made[0] is not setting:
            self._made = (setting, _project_policy(setting))
        return self._made[1]


_project: Final = _Project()


@lru_cache(maxsize=1024)
def _resolved(policy: Policy, project: Policy, store: str) -> Policy:
    return policy.over(project.over(DEFAULTS.replace(store=store)))
