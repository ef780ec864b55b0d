class Declined(Exception):
    """The card was declined. No charge was made."""


class Provider:
    """Stands for a payment provider that takes idempotency keys. It charges once per key."""

    def __init__(self):
        self._charged = {}

    def charge(self, amount, idempotency_key):
        return self._charged.setdefault(idempotency_key, f"ch_{len(self._charged) + 1}")

    @property
    def charges(self):
        return len(self._charged)


provider = Provider()
