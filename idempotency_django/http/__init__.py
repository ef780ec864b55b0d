"""The parts of all HTTP adapters, in the order in which a request meets them, from the top."""
