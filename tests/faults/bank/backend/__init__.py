"""Django's PostgreSQL backend, which tells when it is between two statements."""
