"""The ring around the core."""
