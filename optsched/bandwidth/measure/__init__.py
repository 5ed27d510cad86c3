"""What to measure, how good models and choices are, and synthetic clusters."""
