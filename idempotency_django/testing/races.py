"""Contenders that arrive at the same moment."""

from __future__ import annotations

import threading
from datetime import timedelta

from ..records import Claim, Operation
from .setting import ContractSetting
from .support import ANSWER, PATIENCE, an_operation, in_threads, in_words


class RacesContract(ContractSetting):
    """Of many contenders, one gets the claim."""

    def test_one_of_many_claims(self) -> None:
        """Of simultaneous duplicates, one claims; the others get "in progress" in the meantime."""
        self._race(an_operation())

    def test_one_of_many_takes_over_a_failed_key(self) -> None:
        """Only one contender claims a failed record again."""
        operation = an_operation()
        self.failed(operation)
        self._race(operation)

    def test_one_of_many_takes_over_an_expired_key(self) -> None:
        """Only one contender claims an expired record again."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        self._race(an_operation(key=operation.key))

    def test_refused_request_frees_nothing(self) -> None:
        """A third request, after a second was refused, does not get the first one's claim."""
        if not self.tells_at_once:
            return
        operation = an_operation()
        with self.store.transaction():
            claim = self.claim(operation)
            for _ in range(3):
                [found] = in_threads([lambda: self._attempt(operation)])
                assert found == "in progress"
            assert self.store.complete(claim, ANSWER)
        assert self._attempt(operation) == "completed"

    def _race(self, operation: Operation, contenders: int = 16) -> None:
        refused = threading.Semaphore(0)

        def contend() -> str:
            with self.store.transaction():
                found = self.store.acquire(operation)
                if isinstance(found, Claim):
                    # The owner holds on until all others have been told.
                    for _ in range(contenders - 1 if self.tells_at_once else 0):
                        assert refused.acquire(timeout=PATIENCE), "A duplicate had to wait."
                    assert self.store.complete(found, ANSWER)
                    return "claimed"
            refused.release()
            return in_words(found)

        said = sorted(in_threads([contend] * contenders))
        if self.tells_at_once:
            assert said == ["claimed"] + ["in progress"] * (contenders - 1)
        else:
            assert said == ["claimed"] + ["completed"] * (contenders - 1)
        assert self.record(operation).payload == ANSWER

    def _attempt(self, operation: Operation) -> str:
        return in_words(self.acquire(operation))
