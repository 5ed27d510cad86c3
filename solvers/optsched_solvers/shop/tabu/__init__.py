"""Tabu search."""
