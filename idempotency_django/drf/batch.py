"""Batch requests: a list of items, of which each has a key of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from django.db import transaction
from rest_framework.exceptions import ParseError
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.utils.encoders import JSONEncoder
from rest_framework.views import APIView

from ..conf import conf
from ..engine import Result
from ..engine.context import ExecutionContext
from ..engine.functions import json_payload, run_plan
from ..engine.planning import Plan
from ..engine.steps import no_json
from ..errors import IdempotencyError, KeyMalformed, KeyMissing
from ..http.messages import HAS_UNFINISHED, error_body, operation_name, status_of
from ..http.parts import RequestPart, refuse_fields_of_responses
from ..logs import escaped
from ..policy import NEVER_STORED, Policy, dialect_of, resolve
from ..stores.atomic_blocks import atomic_request_databases

logger = logging.getLogger("idempotency_django")


def idempotent_items(
    view: APIView,
    execute: Callable[[Any], Response],
    *,
    key: str = "idempotency_key",
    policy: Policy | None = None,
) -> list[dict[str, Any]]:
    """Execute each item of a batch request once per key of its own.

    ::

        def post(self, request):
            return Response(idempotent_items(self, self.create), status=207)

    The items are the list in the request's body, and are executed in its order. Each is a
    transaction of its own, so one that fails does not undo others, and a retry executes only
    those that are not done, also where the request as a whole has a key. The view's authentication
    and permissions have run before.

    Args:
        view: the view that handles the request; its ``handle_exception()`` makes the responses of
            errors.
        execute: executes one item, an object of the list, and returns its response. As in a view,
            a raised error and a returned 5xx are rolled back, and a returned 4xx is stored.
        key: the member of an item with its key; an item without a key is refused.
        policy: the policy of the items; by default the project's.

    Returns:
        For each item, in their order, its ``status``, its ``body``, and as ``replayed`` whether it
        is the response of an earlier request.

    Raises:
        ParseError: the body is not a list.
        ImproperlyConfigured: the policy has ``on_replay``, ``rebuild``, ``replay_status``,
            ``on_conflict="accepted"`` or ``store_errors``, which are for HTTP responses.
        TypeError: the data of a response is not JSON; the item is rolled back.
    """
    request: Any = view.request
    if not isinstance(request.data, list):
        raise ParseError("The body must be a list of items.")
    policy = policy or Policy()
    refuse_fields_of_responses(
        policy,
        "idempotent_items()",
        "and an item has none of its own: a retry gets its status and body as they were. Remove "
        "them.",
        "store_errors",
    )
    batch = _Batch(view, execute, key, resolve(policy))
    entries = [batch.entry(item) for item in request.data]
    if batch.is_unfinished:
        setattr(request._request, HAS_UNFINISHED, True)
    return entries


class _Batch:
    """One request with its items.

    Attributes:
        is_unfinished: whether the response of an item is not stored, so that a retry executes it.
    """

    is_unfinished = False

    def __init__(
        self, view: Any, execute: Callable[[Any], Response], key: str, policy: Policy
    ) -> None:
        self._view = view
        self._execute = execute
        self._key = key
        self._policy = policy
        self._request = view.request
        self._missing = (
            f"This item has no {key!r}. Send a new, unique key with each new item, and the same "
            "key with each retry of it."
        )

    def entry(self, item: Any) -> dict[str, Any]:
        """The response of one item, for the list."""
        request = self._request._request
        key = item.get(self._key) if isinstance(item, Mapping) else None
        if not conf.enabled:
            key = str(uuid4())  # none is missing or malformed
        part = RequestPart(
            request,
            self._policy,
            key=key,
            name=f"item of {operation_name(request)}",
            content=lambda: item,
            missing=self._missing,
            own=self._request,
        )

        def execute(execution: ExecutionContext) -> Response:
            with part.running(execution):
                return self._execute(item)

        try:
            planned = self._planned(item, key, part)
            outcome = run_plan(
                planned, execute, answer=self._answer, admit=part.admit, of_client=True
            )
        except IdempotencyError as error:
            if part.is_foreign_error:
                return self._failed(error)
            self.is_unfinished = True
            dialect = dialect_of(self._policy)
            status, body = status_of(error, dialect), error_body(error, dialect)
            return {"status": status, "body": body, "replayed": False}
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this item's
            return self._failed(error)
        self.is_unfinished = self.is_unfinished or not outcome.stored
        return {**outcome.result, "replayed": outcome.replayed}

    def _planned(self, item: Any, key: Any, part: RequestPart) -> Plan:
        if not isinstance(item, Mapping):
            raise ParseError("An item must be an object.")
        if not isinstance(key, str | None):
            raise KeyMalformed(f"The {self._key!r} of an item is not a string. Send a string.")
        planned = part.plan()
        if planned is None:
            raise KeyMissing(self._missing)
        return planned

    def _answer(self, planned: Plan, response: Response) -> Result:
        """The result of an item; it is as it reads back from JSON, also the first time."""
        status, wanted = response.status_code, None
        try:
            text = json.dumps(
                {"status": status, "body": response.data},
                cls=JSONEncoder,
                allow_nan=not api_settings.STRICT_JSON,  # as the renderer of the whole list
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise no_json(planned.operation.name, error) from error
        entry = json.loads(text)
        if self._policy.should_store:
            wanted = self._policy.should_store(self._request, response)
        if status >= 500 or wanted is False or (wanted is None and status in NEVER_STORED):
            return Result(entry, None, error=f"The item's response had the status {status}.")
        return Result(entry, json_payload(text, self._policy, status))

    def _failed(self, error: Exception) -> dict[str, Any]:
        """The response of an error, as the view answers it."""
        self.is_unfinished = True
        try:
            with ExitStack() as own:
                # REST framework's handler marks the transactions of ATOMIC_REQUESTS for rollback,
                # in which the other items are: it gets its own.
                for alias in atomic_request_databases():
                    own.enter_context(transaction.atomic(using=alias))
                response = self._view.handle_exception(error)
            entry = {"status": response.status_code, "body": response.data, "replayed": False}
        except Exception:
            logger.exception(
                "An item of the batch %s failed. The other items are not affected.",
                escaped(self._request.path),
            )
            body = {"detail": "A server error occurred."}
            entry = {"status": 500, "body": body, "replayed": False}
        return entry
