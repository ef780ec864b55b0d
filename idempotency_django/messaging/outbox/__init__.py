"""The outbox: what is published if, and only if, its transaction was committed."""
