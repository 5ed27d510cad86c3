"""Devices that cannot hold all states: budget of bytes, slots, prefetched copies."""
