"""Celery workers, real processes on real brokers, whose messages are delivered more than once."""
