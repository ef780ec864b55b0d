"""Finds what an operation has made, by the key of the request that made it."""

from __future__ import annotations

from copy import copy
from typing import Any

from django.db.models import QuerySet
from rest_framework.filters import BaseFilterBackend
from rest_framework.request import Request, clone_request

from ..conf import conf
from ..errors import IdempotencyError
from ..http.messages import host_of
from ..http.resources import owner_of, pk_of
from ..http.routes import name_of_route
from ..http.unwrapping import POLICY, policy_of, protected_part
from ..policy import PROJECT_POLICY, UNSET, Policy, identity
from ..stores import stores
from .adapter import DRFAdapter, IdempotencyAPIException


class IdempotencyKeyFilter(BaseFilterBackend):
    """Filters a list by the key of the request that created an object.

    A client that lost the response asks ``GET /charges/?idempotency_key=…`` for what its
    ``POST /charges/`` has created. The list must have the same route as the POST, whose view says
    what it created::

        class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet):
            filter_backends = [IdempotencyKeyFilter]

            def perform_create(self, serializer):
                self.request.idempotency.resource = serializer.save()

    It finds an object of the view's queryset as it is now, and only with a key of the caller's own.
    Otherwise the list is empty: the operation is in progress, has failed or expired, or never ran.
    """

    parameter = "idempotency_key"

    def filter_queryset(
        self, request: Request, queryset: QuerySet[Any], view: Any
    ) -> QuerySet[Any]:
        sent = request.query_params.get(self.parameter)
        if sent is None:
            return queryset
        try:
            pk = _found(request, queryset.model, view, sent)
        except IdempotencyError as error:
            raise IdempotencyAPIException(error) from error
        return queryset.none() if pk is None else queryset.filter(pk=pk)

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """The parameter, for OpenAPI."""
        return [
            {
                "name": self.parameter,
                "required": False,
                "in": "query",
                "description": "The idempotency key of the request that created the object.",
                "schema": {"type": "string"},
            }
        ]


def _found(request: Request, model: Any, view: Any, sent: str) -> str | None:
    """The primary key of what the caller's POST with this key has created, if it is known."""
    match: Any = request._request.resolver_match
    creating = copy(view)  # the view, as it is for a POST
    creating.request = clone_request(request, "POST")
    creating.action = (getattr(view, "action_map", None) or {}).get("post")
    declared = _policy(creating, match.func)
    if declared is None:
        return None
    policy = (PROJECT_POLICY if declared is UNSET else declared).resolved()
    key = identity.client_key(policy, sent)
    if key is None:
        return None
    adapter = DRFAdapter(creating, creating.request, list)
    invocation = adapter.invocation(policy).changed(
        name=f"POST {name_of_route(match.route)}", method="POST"
    )
    if policy.principal:
        invocation = identity.identified(policy, invocation)
    scope = identity.scope_of(policy, invocation, adapter.scope())
    record = stores[policy.store].get(key, scope)
    if record is None or record.payload is None:
        return None
    reserved = policy.reserved.total_seconds()
    if record.expired and (not reserved or (record.ttl_left or 0.0) + reserved <= 0):
        return None  # another operation may have the key
    caller = identity.caller_of(policy, invocation)
    # What was made without credentials belongs to everybody who knows the key.
    callers = {caller, ""} if caller == invocation.credentials else {caller}
    host = host_of(request._request) if conf.hosts == "refuse" else ""
    return pk_of(record.payload, model, {owner_of(each, host) for each in callers})


def _policy(view: Any, callback: Any) -> Policy | Any | None:
    """The policy of a POST to the view; ``None``: it is not protected."""
    if hasattr(view, "get_idempotency_policy"):
        return view.get_idempotency_policy()
    part = protected_part(callback, "POST")
    return policy_of(callback, "POST") if part is None else getattr(part, POLICY)
