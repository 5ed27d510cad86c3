"""Jobs and nodes: what is simulated."""
