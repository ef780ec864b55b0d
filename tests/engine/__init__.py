"""The engine: one operation, whoever calls it."""
