"""Views of REST framework."""
