"""Parts of checkpoints: files, shards, states of schedulers."""
