"""The execution that the running code is in, for modules that don't know Django."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

EXECUTION: Final[ContextVar[Any]] = ContextVar("idempotency_execution", default=None)
"""The :class:`~idempotency_django.engine.context.ExecutionContext` of the running handler; the
engine sets it. ``None``: the code runs in no handler.
"""
