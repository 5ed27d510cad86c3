"""The command line of the executor and of torchrun: scripts, progress, files."""
