"""What commands share: the types of their options, and their graceful end."""

from .arguments import duration, number
from .stopping import stop_on_signals

__all__ = ["duration", "number", "stop_on_signals"]
