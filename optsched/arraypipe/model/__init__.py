"""One model cut into stages: modules, traces, tied weights, optimizers."""
