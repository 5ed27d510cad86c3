"""Slow, independent references that tests compare the library with."""
