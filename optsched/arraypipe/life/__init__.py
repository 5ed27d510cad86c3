"""A run that changes: who sits where, and better orders while it goes on."""
