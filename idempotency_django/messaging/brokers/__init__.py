"""One module for each broker: its publisher, and its transport."""
