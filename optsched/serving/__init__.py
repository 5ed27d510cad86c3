"""Serving of slimmable networks: which server, width and batch every request gets."""
