"""What all parts of the contract share: the store, and how a test uses it."""

from __future__ import annotations

from typing import ClassVar

from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from .support import ANSWER, eventually


class ContractSetting:
    """The store under test, and what a test does with it, each in a transaction of its own."""

    store: Store

    tells_at_once: ClassVar[bool] = True
    """Whether a duplicate gets "in progress" while the owner holds on; SQLite makes it wait."""

    forgets_expired: ClassVar[bool] = False
    """Whether the store deletes expired records by itself, so that keys restart with attempt 1."""

    def acquire(self, operation: Operation) -> Claim | Record:
        """Acquire and let go: with a store that has transactions, the claim ends with the call."""
        with self.store.transaction():
            return self.store.acquire(operation)

    def claim(self, operation: Operation) -> Claim:
        """Acquire within a transaction of the caller's."""
        claim = self.store.acquire(operation)
        assert isinstance(claim, Claim)
        return claim

    def completed(self, operation: Operation, payload: Payload = ANSWER) -> Claim:
        """Execute the operation."""
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.complete(claim, payload)
        return claim

    def failed(self, operation: Operation) -> Claim:
        """Fail to execute the operation."""
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.fail(claim, "ValueError: no")
        return claim

    def record(self, operation: Operation) -> Record:
        """The operation's record, which exists."""
        record = self.store.get(operation.key, operation.scope)
        assert record is not None
        return record

    def expire(self, operation: Operation) -> None:
        """Wait for the end of a short time to live."""

        def is_over() -> bool:
            record = self.store.get(operation.key, operation.scope)
            if record is None:
                return self.forgets_expired
            return record.expired and not self.forgets_expired

        eventually(is_over)
