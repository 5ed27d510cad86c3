"""Evictions and moves on a running cluster: integer model, and search by domains."""
