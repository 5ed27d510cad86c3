"""Routers of inference requests."""
