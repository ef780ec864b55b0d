"""A ledger, which is somebody else's service: it books once what it is told under one key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.request import urlopen

from idempotency_django.testing import PATIENCE


@dataclass(frozen=True)
class Ledger:
    """The one that serves at that URL."""

    url: str

    def bookings(self, reference: str) -> tuple[int, int]:
        """How often it was called for a reference, and how often it booked."""
        with urlopen(f"{self.url}/calls?reference={reference}", timeout=PATIENCE) as response:
            told = json.load(response)
        return told["calls"], told["effects"]
