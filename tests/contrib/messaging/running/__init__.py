"""All parts of messaging in one process."""
