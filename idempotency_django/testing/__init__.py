"""For tests of projects: clients and assertions for retries, races and crashes. For stores: their
contract, as a suite for any store.

::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _store(self, transactional_db):
            self.store = MyStore("default")

All of it works in any test framework: the suite's methods named ``test_…`` are plain functions
with ``assert``, and ``self.store`` is the store. Do not run its tests within a transaction: they
use threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .clients import IdempotentTestClient, assert_replayed
    from .contract import (
        MOMENT,
        PATIENCE,
        RESPONSE,
        SECOND,
        StoreContract,
        an_operation,
        eventually,
        in_threads,
    )
    from .drf import IdempotentAPIClient
    from .effects import effects_outside
    from .faults import Race, crash, race

__all__ = [
    "MOMENT",
    "PATIENCE",
    "RESPONSE",
    "SECOND",
    "IdempotentAPIClient",
    "IdempotentTestClient",
    "Race",
    "StoreContract",
    "an_operation",
    "assert_replayed",
    "crash",
    "effects_outside",
    "eventually",
    "in_threads",
    "race",
]

# pytest loads plugin.py in every project that installs this package, so nothing is imported here.
__getattr__ = lazily(
    __name__,
    globals(),
    {
        "RESPONSE": "contract",
        "MOMENT": "contract",
        "PATIENCE": "contract",
        "SECOND": "contract",
        "IdempotentAPIClient": "drf",
        "IdempotentTestClient": "clients",
        "Race": "faults",
        "StoreContract": "contract",
        "an_operation": "contract",
        "assert_replayed": "clients",
        "crash": "faults",
        "effects_outside": "effects",
        "eventually": "contract",
        "in_threads": "contract",
        "race": "faults",
    },
)
