"""HTML forms with a key: ``{% load idempotency %}`` and ``{% idempotency_key %}``."""
