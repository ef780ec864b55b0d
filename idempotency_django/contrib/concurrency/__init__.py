"""Natural keys, transitions, versions and preconditions: two writers, and one of them wins."""
