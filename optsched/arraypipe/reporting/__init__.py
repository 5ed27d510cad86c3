"""Parts of trace and report: records as arrays, the virtual clock, prediction."""
