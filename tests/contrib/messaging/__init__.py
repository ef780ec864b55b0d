"""Messages: published, delivered and handled once."""
