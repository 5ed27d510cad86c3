"""What a solver sees and what it returns: problem, limits, monitor, result, registry."""
