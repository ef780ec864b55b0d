"""The reference app under real gunicorn processes, seen from outside, on every database."""
