"""Celery tasks: a message that the broker delivers twice has its effect once.

This package imports Celery, so the extra ``celery`` must be installed.
"""

from __future__ import annotations

from .tasks import IdempotentTask

__all__ = ["IdempotentTask"]
