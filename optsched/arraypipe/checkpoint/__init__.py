"""Checkpoints: whole folders, and what a stage brings to them."""
