"""Crashes and faults: what they leave behind, counted in effects."""
