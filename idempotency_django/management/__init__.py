"""What commands share: the types of their options, their graceful end, and what waits too long."""

from .arguments import number
from .health import PURGE_AGE, Finding, Names, findings, overdue, register_health
from .stopping import stop_on_signals

__all__ = [
    "PURGE_AGE",
    "Finding",
    "Names",
    "findings",
    "number",
    "overdue",
    "register_health",
    "stop_on_signals",
]
