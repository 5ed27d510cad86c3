"""Parts of `ArraySweep`: trials, seats, files."""
