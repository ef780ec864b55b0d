"""Transports: real brokers, whose messages have one effect each."""
