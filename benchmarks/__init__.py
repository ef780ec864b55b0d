"""Measures what protection costs: ``python -m benchmarks`` writes ``docs/benchmarks.md``.

The same DRF view is called bare, with ``IdempotentViewMixin`` in its modes and on its stores, and
with django-idempotency-key on Redis; the same function with ``idempotent_call`` and with AWS
Powertools on Redis; all on a PostgreSQL and a Valkey of their own, which are reached directly and
over a relay that makes them half a millisecond away. Absolute times belong to the machine; what is
to be compared are ratios within one run.
"""
