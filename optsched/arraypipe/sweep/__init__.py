"""`ArraySweep`: trials of a study side by side in a job array."""
