"""What projects test with."""
