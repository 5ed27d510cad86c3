"""Devices that cannot hold all states: the account of bytes, slots, copies."""
