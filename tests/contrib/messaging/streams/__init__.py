"""Streams and peers: one effect for each number, whoever owns the stream."""
