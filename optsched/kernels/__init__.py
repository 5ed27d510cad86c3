"""Compiled functions that more than one place calls, and how they are compiled."""
