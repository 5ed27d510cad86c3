"""Job arrays on a pipeline of devices (JAPSP)."""
