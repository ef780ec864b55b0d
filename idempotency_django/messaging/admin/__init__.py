"""The tables of messaging in the admin."""
