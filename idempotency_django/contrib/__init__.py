"""Integrations around the core. Each is optional, and imports the core's public packages only."""
