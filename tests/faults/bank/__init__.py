"""A small project whose operations are killed, cut off and retried."""
