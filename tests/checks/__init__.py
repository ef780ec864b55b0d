"""The system checks."""
