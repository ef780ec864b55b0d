"""Filters of seen events: they spare look-ups, and decide nothing."""
