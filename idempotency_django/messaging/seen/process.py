"""A Bloom filter in the memory of this process, by ``rbloom``: the extra ``[bloom]``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

try:
    from rbloom import Bloom
except ImportError as missing:
    raise ModuleNotFoundError(
        'InProcessBloom needs rbloom. Run pip install "idempotency-django[bloom]".', name="rbloom"
    ) from missing

from . import SeenFilter, validate_sizes


class InProcessBloom(SeenFilter):
    """Remembers what this process has handled, in some 2 bytes for each event.

    Other processes do not share it, and a restart empties it. So it suits a partition that one
    process reads for long, or an archive that is read again.

    Args:
        capacity: how many events one generation takes. When it is full, a new one begins, and the
            oldest one is forgotten.
        error: the share of new events that it takes for seen, for which the store is asked in vain.
        generations: how many generations are remembered.

    Raises:
        ValueError: one of them is out of its range.
    """

    def __init__(self, capacity: int, *, error: float = 0.001, generations: int = 2) -> None:
        validate_sizes(capacity, error, generations)
        self.capacity = capacity
        self.error = error / generations  # each of them adds its own
        self._generations: deque[Bloom] = deque(maxlen=generations)
        self._size = capacity
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<InProcessBloom of {self.capacity}>"

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        with self._lock:
            return [any(each in bloom for bloom in self._generations) for each in ids]

    def add(self, ids: Sequence[str]) -> None:
        with self._lock:
            for each in ids:
                if self._size >= self.capacity:
                    self._generations.append(Bloom(self.capacity, self.error))
                    self._size = 0
                newest = self._generations[-1]
                self._size += each not in newest
                newest.add(each)
