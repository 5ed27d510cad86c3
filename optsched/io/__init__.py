"""Files and values: strict JSON, atomic writes, and the checks of single values."""
