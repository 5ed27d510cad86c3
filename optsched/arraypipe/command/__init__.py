"""Parts of the command line and of torchrun: scripts, ranks, progress, files."""
