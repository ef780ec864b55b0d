"""For tests: :func:`effects_outside`, and the contract of stores as a suite for any store.

::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _store(self, transactional_db):
            self.store = MyStore("default")

It needs no particular test framework: the methods named ``test_…`` are plain functions with
``assert``, and ``self.store`` is the store. Do not run its tests within a transaction: they use
threads.
"""

from __future__ import annotations

from ..engine.effects import Effect, effects_outside
from .contract import (
    ANSWER,
    MOMENT,
    PATIENCE,
    SECOND,
    BatchesContract,
    OwnersContract,
    RacesContract,
    an_operation,
    eventually,
    in_threads,
)

__all__ = [
    "ANSWER",
    "MOMENT",
    "PATIENCE",
    "SECOND",
    "Effect",
    "StoreContract",
    "an_operation",
    "effects_outside",
    "eventually",
    "in_threads",
]


class StoreContract(OwnersContract, BatchesContract, RacesContract):
    """Subclass it and set ``self.store`` before each test."""
