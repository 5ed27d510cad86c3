"""Policies that tests name by ``module:name``."""

from __future__ import annotations

from typing import Any

from optsched.cluster import RulePolicy


def first_fit(view: Any) -> Any:
    """Start what fits at its smallest size, by position."""
    quota, free = view.gpus.copy(), view.free.sum()
    for i in range(len(quota)):
        gpus = view.size[view.size_ptr[i]]
        if not view.running[i] and gpus <= free:
            quota[i] = gpus
            free -= gpus
    return quota


class Limited(RulePolicy):
    """The same, for jobs up to a number of GPUs first."""

    name, options = "limited", ("most",)

    def __init__(self, *, most: int = 8) -> None:
        self.most = int(most)

    def arguments(self, workload: Any, nodes: Any, settings: Any) -> tuple[Any, ...]:
        """The option."""
        return (self.most,)

    @staticmethod
    def rule(view: Any, most: Any) -> Any:
        """Small jobs first."""
        quota, free = view.gpus.copy(), view.free.sum()
        for k in range(2):
            for i in range(len(quota)):
                gpus = view.size[view.size_ptr[i]]
                if quota[i] == 0 and gpus <= free and (k == 1 or gpus <= most):
                    quota[i] = gpus
                    free -= gpus
        return quota
