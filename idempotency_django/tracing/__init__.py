"""One timeline through a chain of causes: from the request to what it set off, in whatever table.

Each record names the operation that caused it. A source knows the records or messages of one kind;
:func:`trace` follows the causes through all sources, up to the root and down to the last effect.
"""

from __future__ import annotations

from .timelines import Entry, Member, RecordSource, Source, Timeline, find, register, trace

__all__ = ["Entry", "Member", "Source", "Timeline", "find", "register", "trace"]

register(RecordSource())
