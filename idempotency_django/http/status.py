"""The status of an operation: the address that a duplicate gets, and what it finds there.

The address names the operation in an opaque token: a client cannot read it, change it or ask for
another operation. The caller must be the user who started the operation, or have the same
``Authorization`` header.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse
from django.urls import NoReverseMatch, reverse

from ..conf import conf
from ..policy.seals import decrypt_token, encrypt_token
from ..stores import Store, stores
from ..stores.records import Operation, Payload, Record, Status

SALT: Final = "idempotency_django.http.status"
UNKNOWN: Final = "unknown"
"""The owner of an operation whose caller a status view cannot tell from others."""


def accepted_response(
    store: Store, operation: Operation, owners: Sequence[str], retry_after: int
) -> HttpResponse:
    """The answer to a duplicate of an operation in progress: 202, and the address of its status."""
    response = JsonResponse({"status": Status.IN_PROGRESS}, status=202)
    response["Location"] = location(store, operation, *owners)
    response["Retry-After"] = str(retry_after)
    response["Cache-Control"] = "no-store"
    return response


def location(store: Store, operation: Operation, *owners: str) -> str:
    """The path of the operation's status.

    Args:
        store: where its record lives.
        operation: the operation.
        owners: who may ask: a principal, or the digest of the ``Authorization`` header;
            empty: everybody who has the address.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    # With the fingerprint, because the key may later name another operation.
    fingerprints = [operation.fingerprint, *operation.aliases]
    owner, *others = owners
    named = [store.alias, operation.key, operation.scope, owner, fingerprints, *others]
    return status_url(encrypt_token(json.dumps(named).encode(), salt=SALT))


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


def record_of(token: str, caller: str, authorization: str) -> Record | None:
    """The record that a token names; ``None``: there is no record, or it is another caller's.

    Args:
        token: from the address that :func:`location` made.
        caller: who is calling; see :func:`idempotency_django.http.messages.principal_of`.
        authorization: a digest of the ``Authorization`` header of the request.
    """
    named = decrypt_token(token, salt=SALT)
    if named is None:
        return None
    alias, key, scope, owner, fingerprints, *others = json.loads(named)
    # An anonymous caller's address is for everybody who has it, as an anonymous caller can be.
    if {owner, *others}.isdisjoint({caller, authorization, ""}) or alias not in conf.stores:
        return None
    record = stores[alias].get(key, scope)
    if record is None or record.expired or record.fingerprint not in ("", *fingerprints):
        return None
    return record


def describe_operation(record: Record) -> dict[str, Any]:
    """The description of a record: its status, its attempt, and its answer if it has one.

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
    """The answer: its body as text if it is text, else in base64; ``None``: it was not kept."""
    shown: dict[str, Any] = {
        "status": payload.status,
        "headers": [list(pair) for pair in payload.sent_headers],
        "body": None,
    }
    if payload.body is not None:
        try:
            shown["body"] = payload.body.decode()
        except UnicodeDecodeError:
            shown["body_base64"] = base64.b64encode(payload.body).decode()
    return shown
