"""What commands share: the types of their options, their graceful end, and what waits too long."""

from .arguments import duration, number
from .health import Finding, Limits, Names, findings, overdue, register_health
from .stopping import stop_on_signals

__all__ = [
    "Finding",
    "Limits",
    "Names",
    "duration",
    "findings",
    "number",
    "overdue",
    "register_health",
    "stop_on_signals",
]
