"""Verifiers: who sent a webhook, which message it is, and what it says."""

from __future__ import annotations

from .base import Contents, Verifier
from .github import GitHub
from .hmac import Hmac
from .standard import StandardWebhooks
from .stripe import Stripe

__all__ = ["Contents", "GitHub", "Hmac", "StandardWebhooks", "Stripe", "Verifier"]
