"""What all HTTP adapters have in common, and how they protect a view."""
