"""The simulated world: what happens when, and what policies see and decide."""
