"""Why an array and training alone differ: which of data, model and loss do not repeat values."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optsched.arraypipe.job import seed_generator
from optsched.arraypipe.model.inputs import mapped, tensors_in
from optsched.arraypipe.model.optimizers import same
from optsched.arraypipe.model.stand_ins import buffer_holders
from optsched.arraypipe.model.unchanged import buffers_at, changed_since, copied, counts_of
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import global_state_kept
from optsched.arraypipe.runtime.stages import fresh_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.trainer import ArrayTrainer


def cause(trainer: ArrayTrainer, job: Job, steps: int, device: torch.device) -> str:
    """Call data, model and loss twice with equal arguments; in words what is not equal again.

    Before every call the random states are equal; then each of them is another once. Random
    numbers of torch are no fault of model and loss, as every block has its own seed.
    """
    build_model, loss, data = trainer.build_model, trainer.loss, trainer.data
    with global_state_kept():
        model = fresh_model(build_model, job).to(device)
        holders = buffer_holders([model])
        feed = Feed(data, job, "", 0)
        feed.draw(0)
        inputs, target = feed.microbatch(0, device)

        def forward() -> Any:
            buffers: Any = tuple(part._buffers[name] for part, name in holders)
            with buffers_at(holders, copied(buffers)):
                return inputs.copied().call(model)

        output = mapped(forward(), torch.detach)
        before = counts_of([model])
        calls: dict[str, Callable[[], Any]] = {
            "data": lambda: [*islice(iter(data(job, 0)), steps)],
            "build_model": lambda: [*fresh_model(build_model, job).state_dict().values()],
            "the forward": forward,
        }
        if loss is not None:
            function = loss
            calls["loss"] = lambda: function(
                mapped(output, torch.clone), mapped(target, torch.clone)
            )
        found = []
        for name, call in calls.items():
            if why := _unlike(call, device, ("torch",) * (name == "data") + ("random", "numpy")):
                changed = changed_since(before) if call is forward else []
                rows = [
                    f", which changes {key!r} of {type(part).__name__}," for part, key in changed
                ]
                found.append(f"{name}{''.join(rows[:1])} {why}")
    return "; ".join(found)


def _unlike(call: Callable[[], Any], device: torch.device, others: tuple[str, ...]) -> str:
    """How the result of a call is not always the same, in words; ``""`` if it is.

    `others` are the random generators of the process that it must not depend on.
    """

    def value(other: str = "") -> list[Tensor]:
        seed_generator(1 + (other == "torch"), device)
        random.seed(1 + (other == "random"))
        np.random.seed(1 + (other == "numpy"))  # noqa: NPY002
        return [t.detach().clone() for t in tensors_in(call())]

    first = value()
    if not same(first, value()):
        return (
            "gives other values when called again with the same arguments: it keeps state from "
            "call to call, such as a counter, a generator of its own, an open file, an iterator"
        )
    for other in others:
        if not same(first, value(other)):
            return f"depends on the global random numbers of {other!r}, which all jobs draw from"
    return ""
