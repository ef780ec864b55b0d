"""The outbox: messages that are sent if, and only if, the transaction around them is committed."""
