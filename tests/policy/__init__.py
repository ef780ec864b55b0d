"""Policies, keys, scopes and fingerprints."""
