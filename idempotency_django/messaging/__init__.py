"""Consumers: one effect for each message, however often its transport delivers it."""
