"""Transports: they take messages from a broker, and acknowledge what a consumer has handled."""
