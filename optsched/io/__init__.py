"""Strict JSON, CSV, atomic files, and checks and formatting of single values."""
