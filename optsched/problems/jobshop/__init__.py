"""Job shops."""
