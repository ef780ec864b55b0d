"""A part of a request that has a key of its own: an item of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from ..conf import conf
from ..engine.context import ExecutionContext
from ..engine.planning import Plan, plan, plan_unprotected
from ..errors import IdempotencyError, KeyMissing
from ..policy import UNSET, Policy, dialect_of, keys
from ..policy.invocation import Invocation, Parsed
from ..stores.records import Record
from .messages import invocation_of, meta_name, refuse_result

_OF_RESPONSES: Final = ("on_replay", "rebuild", "replay_status")
"""The fields of a policy about HTTP responses, of which a part has none."""


def refuse_fields_of_responses(policy: Policy, of: str, hint: str, *helpers: str) -> None:
    """Refuse what would have no effect: a part of a request has no HTTP response of its own.

    Args:
        policy: as it is declared. The project's may have these fields, for its views.
        of: whose policy it is.
        hint: what the error says at its end.
        helpers: the functions of this package without effect as ``should_store``, by name.

    Raises:
        ImproperlyConfigured: the policy has such a field.
    """
    without_use = [each for each in _OF_RESPONSES if getattr(policy, each) is not UNSET]
    if policy.on_conflict == "accepted":
        without_use.append("on_conflict='accepted'")
    should_store = policy.should_store
    if isinstance(should_store, FunctionType) and should_store.__module__ == Policy.__module__:
        name = should_store.__qualname__.partition(".")[0]
        without_use += [f"should_store={name}"] if name in helpers else []
    if without_use:
        raise ImproperlyConfigured(
            f"The policy of {of} has {' and '.join(without_use)}. These are for HTTP responses, "
            f"{hint}"
        )


class RequestPart:
    """One part of a request, to be planned (a :class:`~..planning.PlanRequest`).

    Its caller is the request's; its key, its name and what it asks for are its own.

    Args:
        request: Django's request.
        policy: the policy of the part, resolved.
        key: the key, as the client sent it; ``None``: it sent none.
        name: the name of the operation.
        content: makes what is asked for, as plain data, when it is compared.
        missing: tells the client where it sends the key, if it sent none.
        own: the request as the framework's own views know it, if that is another one.
        path: says where the part is; by default, where the request is.

    Attributes:
        is_foreign_error: whether the part has raised an error of another operation, such as a
            nested call: that says nothing of the part's own key.
    """

    is_foreign_error = False

    def __init__(
        self,
        request: HttpRequest,
        policy: Policy,
        *,
        key: str | None,
        name: str,
        content: Callable[[], Any],
        missing: str,
        own: Any = None,
        path: Callable[[], str] | None = None,
    ) -> None:
        self.method = request.method or ""
        self._request = request
        self._policy = policy
        self._key = key
        self._name = name
        self._content = content
        self._missing = missing
        self._own = request if own is None else own
        self._path = path

    def plan(self, *, asynchronous: bool = False) -> Plan | None:
        """The part's plan; ``None``: it has no key, and needs none.

        Raises:
            IdempotencyError: its key is missing, malformed or guessable.
        """
        policy = self._policy
        if not conf.enabled:
            has_key = self._key is not None or policy.key or policy.requires_key(self.method)
            return plan_unprotected(policy, self._name) if has_key else None
        try:
            return plan(policy, self, asynchronous=asynchronous)
        except KeyMissing as error:
            if keys.reads_header(policy.key):
                raise KeyMissing(self._missing) from error
            raise

    def header(self) -> str | None:
        """The key of the part."""
        return self._key

    def sent_header(self) -> str | None:
        """When the client sent the request first, as the header of the policy's dialect says."""
        name = dialect_of(self._policy).sent_header
        value: str | None = self._request.META.get(meta_name(name))
        return value

    def scope(self) -> str | None:
        """The policy's."""
        return None

    def invocation(self, policy: Policy) -> Invocation:
        """The invocation that the part is."""
        whole = invocation_of(
            self._request, policy, own=self._own, auth=getattr(self._own, "auth", None)
        )
        return whole.changed(
            name=self._name,
            path=whole.path if self._path is None else self._path(),
            media_type="",
            read=lambda: Parsed(self._content()),
        )

    @contextmanager
    def running(self, execution: ExecutionContext) -> Iterator[None]:
        """In the block, the request has the execution of the part, as a view's has."""
        request: Any = self._request
        outer = getattr(request, "idempotency", None)
        request.idempotency = execution
        try:
            yield
        except IdempotencyError as error:
            self.is_foreign_error = error.foreign
            raise
        finally:
            request.idempotency = outer

    def admit(self, record: Record) -> None:
        """Raise to refuse a replay, as the policy's ``check_replay`` says."""
        if self._policy.check_replay is not None:
            refuse_result(self._policy.check_replay(self._own, record), "check_replay of a policy")
