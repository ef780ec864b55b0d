"""Policies: what identifies an operation, and what is kept of its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from ..conf import conf, default_store, did_you_mean
from .fields import FIELDS, NEVER_STORED, UNSET, PolicyFields

__all__ = [
    "API",
    "DEFAULTS",
    "NEVER_STORED",
    "PAYMENT",
    "PROJECT_POLICY",
    "UNSET",
    "WEBHOOK",
    "Policy",
    "resolve",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy(PolicyFields):
    """How the operations of a view are identified, and what is kept of their answers.

    A field that is not given takes its value from the project's policy, ``IDEMPOTENCY["POLICY"]``.
    A field that this does not set either takes its value from :data:`DEFAULTS`. A policy is
    immutable and may be shared.

    Each field has its type, default and description in :mod:`idempotency_django.policy.fields`.
    """

    def replace(self, **changes: Any) -> Policy:
        """The same policy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def over(self, base: Policy) -> Policy:
        """This policy, with unset fields taken from ``base``."""
        given = {name: getattr(self, name) for name in FIELDS}
        return dataclasses.replace(base, **{k: v for k, v in given.items() if v is not UNSET})

    def resolved(self) -> Policy:
        """This policy, with unset fields taken from the project's policy and the defaults."""
        return resolve(self)

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


DEFAULTS: Final = Policy(**{name: field.metadata["default"] for name, field in FIELDS.items()})
"""The values of fields that neither the view's policy nor the project's policy sets."""

PROJECT_POLICY: Final = Policy()
"""The project's policy, where a view or a call has none of its own; made once, as it is cached."""

API: Final = Policy(ttl=timedelta(hours=24))
"""For an API: clients retry within a day."""

WEBHOOK: Final = Policy(ttl=timedelta(days=7))
"""For receiving webhooks: senders deliver again for some days."""

PAYMENT: Final = Policy(ttl=timedelta(days=30), required=True)
"""For payments: the key is required, and lives as long as a settlement takes."""


@lru_cache(maxsize=1)
def _project_policy() -> Policy:
    """The project's policy, from ``IDEMPOTENCY["POLICY"]``."""
    setting = conf.policy
    if isinstance(setting, Policy):
        return setting
    if not isinstance(setting, Mapping):
        raise ImproperlyConfigured(
            "IDEMPOTENCY['POLICY'] must be a dict of policy fields or a Policy, "
            f"not {type(setting).__name__}."
        )
    unknown = [
        f"has no field {name!r}. {did_you_mean(name, FIELDS)}"
        for name in setting
        if name not in FIELDS
    ]
    if unknown:
        raise ImproperlyConfigured(f"IDEMPOTENCY['POLICY'] {' It '.join(unknown)}")
    return Policy(**setting)


@lru_cache(maxsize=1024)
def resolve(policy: Policy) -> Policy:
    """:meth:`Policy.resolved`, once for each policy: every request of a view asks for it."""
    return policy.over(_project_policy().over(DEFAULTS.replace(store=default_store())))


def _forget(**_: Any) -> None:
    _project_policy.cache_clear()
    resolve.cache_clear()


setting_changed.connect(_forget, dispatch_uid="idempotency_django.policy")
