"""A payment provider that honours idempotency keys, as far as the examples need one."""

from __future__ import annotations


class Declined(Exception):
    """No charge was made."""


class Provider:
    """Charges once per key."""

    def __init__(self) -> None:
        self._charged: dict[str, str] = {}

    def charge(self, amount: int, idempotency_key: str) -> str:
        """The id of the charge that the key names."""
        return self._charged.setdefault(idempotency_key, f"ch_{len(self._charged) + 1}")

    @property
    def charges(self) -> int:
        """How many charges there are."""
        return len(self._charged)


provider = Provider()
