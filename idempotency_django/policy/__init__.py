"""Policies: what identifies an operation, and which of its responses are kept.

Keys, scopes and fingerprints have a module each, whose functions a policy takes:
``from idempotency_django.policy import keys, scopes, fingerprints``.
"""

from . import fingerprints, keys, scopes
from .digests import canonical, digest
from .identity import named_fingerprints
from .invocation import Invocation
from .policies import (
    DEFAULTS,
    FIELDS,
    INHERITED,
    NEVER_STORED,
    PAYMENT,
    UNSAFE_METHODS,
    UNSET,
    Policy,
    PolicyFields,
    store_errors,
    store_only,
)

__all__ = [
    "DEFAULTS",
    "FIELDS",
    "INHERITED",
    "NEVER_STORED",
    "PAYMENT",
    "UNSAFE_METHODS",
    "UNSET",
    "Invocation",
    "Policy",
    "PolicyFields",
    "canonical",
    "digest",
    "fingerprints",
    "keys",
    "named_fingerprints",
    "scopes",
    "store_errors",
    "store_only",
]
