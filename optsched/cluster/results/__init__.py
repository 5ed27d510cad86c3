"""What came of a simulation."""
