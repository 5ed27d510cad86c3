"""GPU quotas for elastic jobs."""
