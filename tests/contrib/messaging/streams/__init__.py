"""Streams: one effect for each number, whoever owns the stream."""
