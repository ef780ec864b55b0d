"""The database that the tables of messaging are read from and written to."""

from __future__ import annotations

from ..conf import conf


def database() -> str:
    """The alias that ``IDEMPOTENCY["MESSAGING_DATABASE"]`` names; by default ``"default"``.

    Every query goes to it, never to where a router sends reads: a replica may lag behind.
    """
    return conf.messaging_database
