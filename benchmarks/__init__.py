"""Measures what protection costs: ``python -m benchmarks`` writes ``docs/benchmarks.md``.

The same DRF view is called bare, with ``IdempotentViewMixin`` and with django-idempotency-key on
Redis, on a PostgreSQL and a Valkey of its own. Absolute times belong to the machine; what is to be
compared are ratios within one run.
"""
