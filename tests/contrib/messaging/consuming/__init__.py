"""Consumers of a real broker, in processes that are killed."""
