"""What an operator can do to records: each action asks first, is logged, spares what is in use.

A new action is a subclass of :class:`~.base.Action` in the list below. It gets a page for one
record and a button that leads there; if it is ``for_many``, the list of records offers it too.
"""

from __future__ import annotations

from typing import Final

from .base import Action
from .retiring import Delete, Expire
from .settling import Complete, Release

__all__ = ["ACTIONS", "Action"]

ACTIONS: Final[tuple[type[Action], ...]] = (Expire, Delete, Complete, Release)
