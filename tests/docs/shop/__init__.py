"""The project that the documentation's examples are about."""
