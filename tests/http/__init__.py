"""Protected views, whatever protects them."""
