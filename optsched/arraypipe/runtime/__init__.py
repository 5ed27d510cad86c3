"""What trains: state of jobs, blocks, one process with all devices."""
