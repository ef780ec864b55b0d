"""For tests: the contract that every store keeps, as a suite that any store can be run through.

::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _store(self, transactional_db):
            self.store = MyStore("default")

It needs no test framework of its own: the methods named ``test_…`` are plain functions with
``assert``, and ``self.store`` is the store. Run it with a real transaction per test, not within
one: it uses threads.
"""

from __future__ import annotations

from .owners import OwnersContract
from .races import RacesContract
from .steps import StepsContract
from .support import ANSWER, MOMENT, PATIENCE, SECOND, an_operation, eventually, in_threads

__all__ = [
    "ANSWER",
    "MOMENT",
    "PATIENCE",
    "SECOND",
    "StoreContract",
    "an_operation",
    "eventually",
    "in_threads",
]


class StoreContract(OwnersContract, StepsContract, RacesContract):
    """Subclass it and set ``self.store`` before each test."""
