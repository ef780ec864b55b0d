"""The status of an operation: the address that a duplicate gets, and what it finds there.

The address names the operation in a signed token: a client cannot change it or ask for another
operation. The caller must be the user who started the operation, or have the same
``Authorization`` header.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.signing import BadSignature, Signer
from django.http import Http404, HttpRequest
from django.urls import NoReverseMatch, reverse

from ..conf import conf
from ..engine import Plan
from ..policy import identity
from ..stores import Store, stores
from ..stores.records import Operation, Payload, Record, Status
from .invocations import authorization_of, principal_of
from .problems import retry_after

SALT: Final = "idempotency_django.http.status"
UNKNOWN: Final = "unknown"
"""The owner of an operation whose caller a status view cannot tell from others."""


def accepted_payload(plan: Plan, request: HttpRequest) -> Payload:
    """The response to a duplicate of an operation in progress: 202, and where its status is.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    headers = {
        "Content-Type": "application/json",
        "Location": location(plan.store, plan.operation, *_owners(plan, request)),
        "Retry-After": str(retry_after()),
        "Cache-Control": "no-store",
    }
    body = json.dumps({"status": Status.IN_PROGRESS}).encode()
    return Payload(202, tuple(headers.items()), body)


def _owners(plan: Plan, request: HttpRequest) -> list[str]:
    """Who may ask for the status, as records name them; empty: everybody who has the address.

    That is a caller whom its view knows, else who has the same token.
    """
    caller, user = plan.operation.principal, getattr(request, "user", None)
    # Without a primary key, it is the policy that knows the user.
    if caller and getattr(user, "pk", None) is not None and caller == principal_of(user):
        return [caller]
    owners = identity.owners_of(authorization_of(request))[:1]
    if caller and not plan.policy.principal:  # another status view may know it
        owners.append(caller)
    return owners or [UNKNOWN if caller else ""]


def location(store: Store, operation: Operation, *owners: str) -> str:
    """The path of the operation's status.

    Args:
        store: where its record lives.
        operation: the operation.
        owners: who may ask, as records name them; empty: everybody who has the address.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    # With the fingerprint, because the key may later name another operation.
    named = [store.alias, operation.key, operation.scope, operation.fingerprints, owners]
    return status_url(Signer(salt=SALT).sign_object(named))


def status_url(token: str) -> str:
    """The path of the status view for a token.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    try:
        return reverse(conf.status_view, args=[token])
    except NoReverseMatch as error:
        raise ImproperlyConfigured(
            "An idempotency policy has on_conflict='accepted', but no URL is named "
            f"{conf.status_view!r}. Add path('operations/<str:token>/', "
            f"IdempotencyStatusView.as_view(), name={conf.status_view!r}) to the project's URLs."
        ) from error


def record_of(token: str, callers: set[str]) -> Record:
    """The record that a token names.

    Args:
        token: from the address that :func:`location` made.
        callers: who is asking; see :func:`idempotency_django.http.invocations.callers_of`.

    Raises:
        Http404: there is no record, or it is another caller's.
    """
    try:
        alias, key, scope, fingerprints, owners = Signer(salt=SALT).unsign_object(token)
    except BadSignature:
        raise Http404 from None
    # An anonymous caller's address is for everybody who has it, as an anonymous caller can be.
    if {*owners}.isdisjoint(callers | {""}) or alias not in conf.stores:
        raise Http404
    record = stores[alias].get(key, scope)
    if record is None or record.expired or record.fingerprint not in ("", *fingerprints):
        raise Http404
    return record


def describe_operation(record: Record) -> dict[str, Any]:
    """The description of a record: its status, its attempt, and its response if it has one.

    The status is ``in_progress``, ``interrupted`` (a retry resumes it), ``held`` (an operator must
    settle it), ``completed`` or ``failed`` (a retry is a new attempt).
    """
    status = str(record.status)
    if record.interrupted:
        status = "held" if record.held else "interrupted"
    shown: dict[str, Any] = {"status": status, "attempt": record.attempt}
    if record.payload is not None:
        shown["response"] = _describe_response(record.payload)
    return shown


def _describe_response(payload: Payload) -> dict[str, Any]:
    """The response: its body as text if it is text, else in base64; ``None``: it was not kept."""
    shown: dict[str, Any] = {
        "status": payload.status,
        "headers": [list(pair) for pair in payload.headers],
        "body": None,
    }
    if payload.body is not None:
        try:
            shown["body"] = payload.body.decode()
        except UnicodeDecodeError:
            shown["body_base64"] = base64.b64encode(payload.body).decode()
    return shown
