"""Celery tasks that are executed once."""
