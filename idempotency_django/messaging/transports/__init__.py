"""Transports: they take messages from a broker, hand them to a consumer, and then acknowledge them.

Each imports the client library of its broker, which is an extra of this package.
"""
