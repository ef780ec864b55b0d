"""The signals of idempotency_django. Each is sent once per event.

Every signal has the class :class:`~idempotency_django.stores.records.Operation` as its sender and
passes the ``operation``. Receivers are called with ``send_robust``: Django logs a receiver's error,
and the response does not change. If a transaction is open, they are called within a savepoint:
after a database error in one of them, only what they have written is rolled back.

=================  ==========================================  ============================
signal             sent when                                   further arguments
=================  ==========================================  ============================
``claimed``        the right to execute was won; in the        ``attempt``
                   transactional mode inside its transaction
``completed``      the effect and its response are committed   ``attempt``, ``payload``
``replayed``       a stored response was given                 ``record``
``conflicted``     a request got "in progress", "held" or      (none)
                   "expired"
``mismatched``     a key came with a different request         ``record``
``failed``         an attempt raised, or returned 5xx, and     ``attempt``, ``error``
                   was rolled back; the key is free, or held
``released``       an attempt was rolled back for another      ``attempt``, ``error``
                   response that is not kept; the key is free
``lost``           an owner completed too late: its lease had  ``attempt``
                   expired and another attempt took over
=================  ==========================================  ============================

Each claimed attempt ends in exactly one of ``completed``, ``failed``, ``released`` and ``lost``,
unless its process dies or the store cannot be reached when it ends.
"""

from __future__ import annotations

from django.dispatch import Signal

# The sender is always the same, and every operation checks for receivers.
claimed = Signal(use_caching=True)
completed = Signal(use_caching=True)
replayed = Signal(use_caching=True)
conflicted = Signal(use_caching=True)
mismatched = Signal(use_caching=True)
failed = Signal(use_caching=True)
released = Signal(use_caching=True)
lost = Signal(use_caching=True)
