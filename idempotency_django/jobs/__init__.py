"""Tasks and jobs: a message that a queue delivers twice has its effect once."""

from __future__ import annotations

from .functions import idempotent_job

__all__ = ["idempotent_job"]
