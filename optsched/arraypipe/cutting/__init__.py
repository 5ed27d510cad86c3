"""Parts of `split`: tied weights, balanced cuts, traced models."""
