"""For tests: what becomes of a message when the process that handles it is killed, at each point.

:func:`chaos` kills, pauses, duplicates and reorders deliveries to a handler, a view or a task on
real databases, and counts the effects of each message. It makes processes with ``os.fork()``.
"""

from __future__ import annotations

from .boundaries import crash_point
from .report import Report, Trial
from .running import chaos
from .service import Service

__all__ = ["Report", "Service", "Trial", "chaos", "crash_point"]
