"""Lower bounds and proofs."""
