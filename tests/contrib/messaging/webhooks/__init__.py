"""The webhook inbox: from the delivery to the one effect."""
