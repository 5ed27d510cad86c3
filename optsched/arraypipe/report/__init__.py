"""What was run: records as arrays, the trace, where the time went."""
