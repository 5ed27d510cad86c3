"""Where to cut a chain of modules so that the busiest stage has the least to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optsched.pipelines.partition import balanced

if TYPE_CHECKING:
    from collections.abc import Sequence


def balanced_cuts(costs: Sequence[int], stages: int) -> list[int]:
    """Indices that start the second, third, ... stage; the earliest among equally good ones."""
    return balanced(costs, stages)[1:-1]


def counted_costs(model: nn.Module, modules: Sequence[nn.Module], sample: Any) -> list[int]:
    """Work from the call of each module to the call of the next one, on a sample.

    Counted floating point operations, unlike times, are the same in every run. To them the size of
    the module's output is added, so that no module is free.

    Parameters
    ----------
    model
        Called once with the sample; its buffers may change.
    modules
        Parts of the model, in the order in which it calls them. What the model does before the
        first call counts with the first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    begins: list[int] = []
    sizes: list[int] = []
    counter = FlopCounterMode(display=False)

    def before(module: nn.Module, arguments: Any) -> None:
        begins.append(int(counter.get_total_flops()))

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        row = output if isinstance(output, tuple) else (output,)
        sizes.append(sum(t.numel() for t in row if isinstance(t, Tensor)))

    distinct = list(dict.fromkeys(modules))  # one without tensors may stand at several places
    handles = [module.register_forward_pre_hook(before) for module in distinct]
    handles += [module.register_forward_hook(after) for module in distinct]
    try:
        with torch.no_grad(), counter:
            model(sample)
        ends = [*begins[1:], int(counter.get_total_flops())]
    finally:
        for handle in handles:
            handle.remove()
    begins[0] = 0
    return [b - a + size for a, b, size in zip(begins, ends, sizes, strict=True)]
