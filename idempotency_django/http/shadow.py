"""Shadow mode, ``Policy(mode="observe")``: nothing is enforced, and duplicates are counted.

The view runs as if this package were not there. Afterwards, when the transactions around it have
ended, the request is recorded under its key, as any first request, and counted. So the observation
holds no lock while the view runs, joins none of its transactions, and cannot fail it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from asgiref.sync import sync_to_async
from django.apps import apps
from django.contrib.sessions.backends.base import SessionBase
from django.core.exceptions import RequestDataTooBig
from django.db import Error as DatabaseFault
from django.db import connections, router, transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.crypto import salted_hmac
from django.utils.functional import SimpleLazyObject, empty
from django.utils.module_loading import import_string

from ..engine.effects import Observed, observed_effects
from ..engine.outcomes import UNCERTAIN_ERRORS, savepoints
from ..engine.planning import Plan
from ..engine.planning import plan as planned
from ..errors import IdempotencyError, KeyMissing, OperationInProgress, StoreUnavailable
from ..policy import Policy, fingerprints
from ..stores import Store, stores
from ..stores.atomic_blocks import is_open
from ..stores.records import Claim, Operation, Payload, Record, Status
from .atomic_requests import RequestTransactions
from .messages import Adapter, reason_not_to_store
from .routes import readable
from .sessions import SessionSnapshot

logger = logging.getLogger("idempotency_django")

OUTCOMES: Final = {
    "executed": "the first request with its key",
    "replayed": "a duplicate that was executed again",
    "in_progress": "a duplicate that was executed while the first request was",
    "mismatched": "a key that was sent with another request before",
    "missing": "no key",
    "refused": "a malformed or guessable key",
    "released": "a response that is not stored, so that a retry executes again",
}
"""What becomes of an observed request, and what that means. Each request has one outcome."""

DUPLICATES: Final = ("replayed", "in_progress")
DIFFERS: Final = "differs"
"""A duplicate whose response was not the first one; it is counted in addition to its outcome."""

PREFIX: Final = "observed "
"""Begins the key of a record of the shadow mode. No other key has a space: none is ever equal."""

_LONGEST: Final = timedelta(days=30)  # that a record is kept where responses are kept forever
_PAUSE: Final = 10.0  # seconds until a store is tried again
_DIALECTS: Final = "idempotency_django.stores.database.dialects.DIALECTS"
_TRIES: Final = 5  # to count something
_RETRY_SECONDS: Final = 1.0  # in which it is tried again
_RUNNING: Final = "_idempotency_observed"
_DIGEST: Final = ":digest"  # notes in a record's headers, which are never sent
_ENDED: Final = ":ended"

Unprotected = Callable[[Operation | None], AbstractContextManager[None]]

_OUTAGES: Final = (StoreUnavailable, *UNCERTAIN_ERRORS)


class _Failure(NamedTuple):
    """An error that was logged.

    Attributes:
        until: by ``time.monotonic()``: a success from then on makes the next error news.
        is_outage: whether nothing is tried until then.
    """

    until: float
    is_outage: bool


_failures: Final[dict[str, _Failure]] = {}
"""The last error of what has failed, by its name."""


def is_observed(request: HttpRequest) -> bool:
    """Whether a view is running that is observed; a view that it calls is a part of it."""
    return getattr(request, _RUNNING, False)


def serve_observed(
    adapter: Adapter,
    policy: Policy,
    transactions: RequestTransactions | None,
    unprotected: Unprotected,
) -> Any:
    """Run the view of a request, and count what its policy would have done.

    Args:
        adapter: the request, as its adapter handles it.
        policy: the view's policy, resolved.
        transactions: what the adapter opened around the request.
        unprotected: makes the block in which the view runs as an attempt at an operation.
    """
    observation = _Observation(adapter, policy, transactions)
    try:
        with (
            observation.execution(unprotected),
            observed_effects(observation.endpoint) as observation.effects,
        ):
            response = adapter.run_view()
    except Exception:
        observation.after_all(None)
        raise
    adapter.observe(response, observation.after_all)
    return response


async def aserve_observed(adapter: Adapter, policy: Policy, unprotected: Unprotected) -> Any:
    """:func:`serve_observed` for an async view."""
    # In a thread: the caller is looked up in the database, and a policy's callables may use it too.
    observation = await sync_to_async(_Observation)(adapter, policy, None)
    try:
        with (
            observation.execution(unprotected),
            observed_effects(observation.endpoint) as observation.effects,
        ):
            response = await adapter.arun_view()
    except Exception:
        await sync_to_async(observation.after_all)(None)
        raise
    await adapter.aobserve(response, observation.after_all)
    return response


class _Observation:
    """One observed request.

    Args:
        adapter: the request.
        policy: its policy.
        transactions: what the adapter opened around the request.
    """

    def __init__(
        self, adapter: Adapter, policy: Policy, transactions: RequestTransactions | None
    ) -> None:
        self.adapter = adapter
        self.policy = policy
        self.transactions = transactions
        self.began = time.time()
        match = adapter.http_request.resolver_match
        # Without a route, a path would tell of a customer, and be one row for each.
        route = "(no route)" if match is None or match.route is None else readable(match.route)
        self.endpoint = f"{adapter.method} {route}"[:255]
        self.asked: Operation | None = None  # as the policy would execute it
        self.operation: Operation | None = None  # as it is recorded
        self.outcome = ""
        self.effects: Observed = {}
        with self._unnoticed():
            _attempt(f"identify requests of {self.endpoint}", 0.0, self._identify)

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """The block may look into the session, and into its user, without a trace in the response.

        Else it would vary by the cookie, or no longer do so where the view looks into them, too.
        """
        request: Any = self.adapter.http_request
        session = getattr(request, "session", None)
        if not isinstance(session, SessionBase) or session.accessed:
            yield
            return
        user = vars(request).get("user")
        is_unknown = isinstance(user, SimpleLazyObject) and user._wrapped is empty
        before, key = SessionSnapshot(request), session.session_key
        try:
            yield
        finally:
            found = user._wrapped if is_unknown else empty
            if session.session_key != key or session.modified:
                before.restore()  # it has expired: the view finds that out, and the cookie goes
                vars(request).pop("_cached_user", None)
                if found is not empty:
                    user._wrapped = empty
            elif session.accessed:
                session.accessed = False
                if found is not empty:
                    vars(user).update(_wrapped=empty, _setupfunc=partial(_accessed, session, found))

    def _identify(self) -> None:
        try:
            with savepoints():  # the policy's callables may ask the database
                plan = self._plan()
        except KeyMissing:
            plan = None
        except IdempotencyError as error:
            if error.foreign or isinstance(error, StoreUnavailable):
                raise
            self.outcome = "refused"
            return
        if plan is None:
            self.outcome = "missing"
            return
        self.asked = operation = plan.operation
        key = PREFIX + operation.key
        if len(key) > 255:
            key = PREFIX + hashlib.sha256(operation.key.encode()).hexdigest()
        self.operation = replace(
            operation,
            key=key,
            ttl=operation.ttl or _LONGEST,
            retention=timedelta(0),
            reserved=timedelta(0),
            hold=False,
            count_replays=False,
        )

    def _plan(self) -> Plan | None:
        try:
            return planned(self.policy, self.adapter)
        except RequestDataTooBig:  # only to compare it: the view may stream it
            policy = replace(self.policy, fingerprint=fingerprints.without_body)
            return planned(policy, self.adapter)

    @contextmanager
    def execution(self, unprotected: Unprotected) -> Iterator[None]:
        """The block that the view runs in; it gets an execution where a protected view does."""
        request: Any = self.adapter.http_request
        setattr(request, _RUNNING, True)
        try:
            with self._execution(unprotected):
                yield
        finally:
            setattr(request, _RUNNING, False)

    def _execution(self, unprotected: Unprotected) -> AbstractContextManager[None]:
        if self.outcome == "missing" and not self.policy.requires_key(self.adapter.method):
            return nullcontext()
        try:
            return unprotected(self.asked)
        except Exception:  # noqa: BLE001  # the store cannot be made, which is logged already
            return nullcontext()

    def after_all(self, response: HttpResponseBase | None) -> None:
        """Record and count the request when its response is rendered and its transactions ended.

        Args:
            response: the view's; ``None``: it raised an error.
        """
        _attempt(self._name, 0.0, self._wait, response)

    def _wait(self, response: HttpResponseBase | None) -> None:
        if self.transactions is not None and self.transactions.aliases:
            self.transactions.after(partial(self._after_ours, response))
        else:
            self._after_rendering(response)

    def _after_ours(self, response: HttpResponseBase | None, error: BaseException | None) -> None:
        self._after_rendering(None if error is not None else response)

    def _after_rendering(self, response: HttpResponseBase | None) -> None:
        if response is not None and not getattr(response, "is_rendered", True):
            unrendered: Any = response
            unrendered.add_post_render_callback(self._after_transactions)
        else:
            self._after_transactions(response)

    def _after_transactions(self, response: HttpResponseBase | None) -> None:
        """Record it after the transactions that others have opened; if they roll back, never."""
        _attempt(self._name, 0.0, self._schedule, response)

    @property
    def _name(self) -> str:
        return f"record requests in the store {self.policy.store!r}"

    def _schedule(self, response: HttpResponseBase | None) -> None:
        counters = apps.get_model("idempotency_django", "IdempotencyObservation")  # ready by now
        using = stores[self.policy.store].using or router.db_for_write(counters)
        write = partial(
            _attempt,
            self._name,
            _PAUSE,
            self._write,
            counters._default_manager.using(using),
            response,
        )
        if is_open(using):
            transaction.on_commit(write, using=using)
        else:
            write()

    def _write(self, counters: Any, response: HttpResponseBase | None) -> None:
        differs = False
        if self.operation is not None:
            payload = self._payload(response)
            record = _recorded(stores[self.policy.store], self.operation, payload)
            self.outcome = self._outcome_of(self.operation, record, payload)
            if self.outcome in DUPLICATES and record and record.payload:
                differs = payload is None or not _alike(record.payload, payload)
        if self.outcome:
            self._count(counters, differs=differs)

    def _payload(self, response: HttpResponseBase | None) -> Payload | None:
        """What is recorded of a response; ``None``: a retry of it is executed."""
        if response is None:
            return None
        with self._unnoticed():
            if reason_not_to_store(self.adapter, response, self.policy):
                return None
        content = response.content if isinstance(response, HttpResponse) else b""
        digest = salted_hmac("idempotency_django.observed", content, algorithm="sha256")
        # By this machine's clock, which is enough for a statistic.
        notes = ((_DIGEST, digest.hexdigest()), (_ENDED, f"{time.time():.3f}"))
        return Payload(response.status_code, notes, None)

    def _outcome_of(
        self, operation: Operation, record: Record | None, payload: Payload | None
    ) -> str:
        if record is None:
            return "executed" if payload else "released"
        if record.fingerprint not in ("", operation.fingerprint, *operation.aliases):
            return "mismatched"
        if record.payload is None:
            return "in_progress"
        ended = float(dict(record.payload.headers)[_ENDED])
        return "in_progress" if self.began < ended else "replayed"

    def _count(self, counters: Any, *, differs: bool) -> None:
        add = partial(_add, counters, self.endpoint)
        add(self.outcome)
        if differs:
            add(DIFFERS)
        again = int(self.outcome in DUPLICATES)
        for effect in list(self.effects.values()):  # a task that the view started may add to them
            add(effect.kind, effect.where, effect.peer, by=again)


def _add(counters: Any, *what: str, by: int = 1) -> None:
    """Count something; after a conflict with another transaction, again.

    Raises:
        OperationInProgress: another transaction is in the way, which may end soon.
    """
    started = time.monotonic()
    for left in reversed(range(_TRIES)):
        try:
            counters.add(*what, by=by)
        except DatabaseFault as error:
            dialects = import_string(_DIALECTS)  # which need the models, as a project has them now
            if not dialects[connections[counters.db].vendor](counters.db).is_busy(error):
                raise
            # What has waited for a lock does not wait for it once more.
            if not left or time.monotonic() - started > _RETRY_SECONDS:
                raise OperationInProgress from error
        else:
            return


def _accessed(session: SessionBase, user: Any) -> Any:
    """The user, found already, for whom the response varies by the session's cookie."""
    session.accessed = True
    return user


def _recorded(store: Store, operation: Operation, payload: Payload | None) -> Record | None:
    """Store the request as its key's first one; the record if there is one already.

    Without a payload, it only looks.
    """
    if payload is None:
        known = store.get(operation.key, operation.scope)
        return known if known and known.status is Status.COMPLETED and not known.expired else None
    with store.transaction():
        found = store.acquire(operation)
        if isinstance(found, Claim):
            store.complete(found, payload)
            return None
        return found


def _alike(first: Payload, second: Payload) -> bool:
    digests = [dict(each.headers)[_DIGEST] for each in (first, second)]
    return first.status == second.status and digests[0] == digests[1]


def _attempt(what: str, pause: float, function: Callable[..., None], *args: Any) -> None:
    """Call the function, and keep its errors from the request; the first of them is logged.

    Args:
        what: what cannot be done after an error, for the log.
        pause: seconds after an outage in which the function is not called, so that no request waits
            for a store that cannot be reached.
        function: what to call.
        args: its arguments.
    """
    last, now = _failures.get(what), time.monotonic()
    if last and last.is_outage and now < last.until:
        return
    try:
        function(*args)
    except Exception as error:
        is_outage = isinstance(error, _OUTAGES)
        if last is None or (is_outage and not last.is_outage):
            logger.exception(
                "The shadow mode cannot %s. The requests are not affected, but not counted.", what
            )
        _failures[what] = _Failure(time.monotonic() + pause, is_outage)
    else:
        if pause and last and now >= last.until:
            _failures.pop(what, None)
