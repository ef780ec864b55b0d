"""The outbox: published if, and only if, committed; in order; once for each consumer."""
