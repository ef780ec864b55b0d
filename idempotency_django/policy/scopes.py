"""The namespace a key is unique in: who is calling, and which operation.

A scope callable takes an :class:`~idempotency_django.policy.invocation.Invocation` and returns the
scope.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from .digests import digest
from .invocation import Invocation

MAX_LENGTH: Final = 255
ANONYMOUS: Final = "anonymous"

ScopeFunction = Callable[[Invocation], str]

# Not "#": it marks a cut scope, so that no short scope equals the rest of a long one.
_KEPT: Final = " !\"$&'()*+,/:;<=>?@[]^`{|}"
FITS: Final = re.compile(r"[\w.~ !\"$&'()*+,/:;<=>?@\[\]^`{|}-]{1,255}(?<! )", re.ASCII)
"""Matches a scope that :func:`fit` leaves unchanged, as most are."""


def per_user(invocation: Invocation) -> str:
    """The caller and the operation: two users, or two operations, never share a key."""
    return join(invocation.principal or ANONYMOUS, invocation.name)


def per_caller(invocation: Invocation) -> str:
    """The caller: a key that is used for a second operation is a mismatch."""
    return join(invocation.principal or ANONYMOUS, "*")


def per_tenant(tenant: Callable[[Any], object]) -> ScopeFunction:
    """The tenant and the operation: a key belongs to a whole tenant.

    Unless the policy has ``principal=False``, a colleague who sends another's key gets 422:
    the key was used for a different request.

    Args:
        tenant: called with the request; returns what names the tenant, for example its primary key.
    """

    def tenant_scope(invocation: Invocation) -> str:
        return join(f"tenant:{tenant(invocation.request)}", invocation.name)

    return tenant_scope


def shared(invocation: Invocation) -> str:  # noqa: ARG001  # a scope callable takes the call
    """One namespace for all callers and operations; a response is replayed to its caller only."""
    return "global"


def join(*parts: str) -> str:
    """A scope made of parts; different parts never make the same scope."""
    joined = "|".join(parts)
    if "%" not in joined and joined.count("|") == len(parts) - 1:
        return joined
    return "|".join([part.replace("%", "%25").replace("|", "%7C") for part in parts])


def fit(scope: str) -> str:
    """The scope as at most 255 ASCII characters, different for different scopes.

    Databases differ in which other texts they treat as equal: by case, by Unicode form, by trailing
    spaces. A scope that is too long is cut and ends in its SHA-256.
    """
    exact = quote(scope, safe=_KEPT, errors="surrogatepass")
    if exact.endswith(" "):
        exact = exact[:-1] + "%20"
    if len(exact) > MAX_LENGTH:
        exact = f"{exact[: MAX_LENGTH - 65]}#{digest(exact)}"
    return exact
