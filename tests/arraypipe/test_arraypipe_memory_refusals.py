"""Slots that are used wrongly are noticed, and what they cannot hold is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, trainer  # noqa: E402
from test_arraypipe_memory import beside, job, room, stages_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from optsched import InputError, InternalError  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe.memory.copies import Rule  # noqa: E402
from optsched.arraypipe.memory.engines import HostLink  # noqa: E402
from optsched.arraypipe.memory.manager import Slotted  # noqa: E402
from optsched.arraypipe.memory.residency import ResidencyPlan  # noqa: E402
from optsched.arraypipe.memory.slots import layout_of  # noqa: E402
from optsched.arraypipe.memory.types import WEIGHTS, State, Visit  # noqa: E402
from optsched.arraypipe.runtime.types import Kept  # noqa: E402

pytestmark = pytest.mark.torch

# mistakes are loud


def alone_in_slots(slots: int, *jobs: Job) -> Slotted:
    """A memory for the first stages of some jobs, without a trainer."""
    runs = []
    for one in jobs:
        run: Any = type("Run", (), {})()
        run.job, run.title, run.stages = one, f"job{len(runs)}", stages_of(one)
        runs.append(run)
    states = [State(j, 0, layout_of(run.stages[0], "").bytes) for j, run in enumerate(runs)]
    link = HostLink(1.0, 1.0)
    visits = [Visit(j, "R") for j in range(len(jobs))]
    plan = ResidencyPlan.compile(states, visits, None, link, slots=(slots, slots))
    plan = dataclasses.replace(plan, rules=(Rule(slots, slots - 1), Rule(slots, slots - 1)))
    return Slotted(runs, (), 0, plan, torch.device("cpu"))


def test_a_wrong_eviction_trips_the_version_counter() -> None:
    """Whoever overwrites a slot between F and B gets an error, not wrong gradients."""
    memory = alone_in_slots(2, *(job((s, 8, "sgd", 1)) for s in range(2)))
    stage = memory.enter(0, 0, "F", None)
    output = stage.run((torch.randn(8, 6, requires_grad=True),))
    memory.slots[0][0][WEIGHTS].copy_(memory.moving[1].bytes[WEIGHTS])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_state_that_left_between_forward_and_backward_is_noticed() -> None:
    """Also where no weight is saved for the backward, so that no counter would trip."""
    x = torch.randn(8, 6)
    wide = alone_in_slots(2, *(job((s, 8, "sgd", 1), False) for s in range(3)))
    stage = wide.enter(0, 0, "F", None)
    stage.kept[0] = Kept((x,), 0, None, (stage.run((x,)),))
    wide.leave()
    for other in (1, 2):
        for slot in wide.transfers.pools[0].slots:  # nobody has told that there is a graph
            slot.graphs = 0
        wide.enter(other, 0, "F", None)
        wide.leave()
    with pytest.raises(InternalError, match="left its slot between forward and backward"):
        wide.enter(0, 0, "B", None)


class Renorm(nn.Module):
    """Changes its weights in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """After clamping."""
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        y: Tensor = self.inner(x)
        return y


class Own(nn.Parameter):
    """Not a plain parameter."""


def own() -> nn.Module:
    """A model with a parameter class of its own."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].weight = Own(model[0].weight.detach())
    return model


REFUSED: dict[str, tuple[Any, int, str]] = {
    "weights in place": (
        lambda: nn.Sequential(Renorm(), nn.Linear(6, 4)),
        4000,
        "stage 0 changes its weights in place outside of the update",
    ),
    "parameter class": (own, 2500, "a Own cannot be moved"),
    "tiny": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), 100, "0 jobs would fit"),
    "nonsense": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), -1, "integer >= 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """What cannot be moved is refused with a sentence."""
    build, limit, sentence = REFUSED[name]
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(4)]
    schedule = random_schedule([1] * 4, 2, place=[0, 0])
    rest = beside(jobs, schedule, build_model=build, stages=[1]) if limit > 0 else 0
    with pytest.raises(InputError, match=sentence):
        array = trainer(jobs, build_model=build, stages=[1], memory=limit + rest)
        array.run(schedule, 2, on_error="raise")


def test_too_many_pinned_states_are_refused_before_anything_runs(made: list[Any]) -> None:
    """Without recompute the sentence names the device, the bytes and the jobs that would fit."""
    jobs = [job((s, 8, "adamw", 1), recompute=False) for s in range(4)]
    forward = random_schedule([1] * 4, 3, place=[0, 0, 0], seed=0)
    with pytest.raises(InputError, match=r"between a forward and its backward .* recompute=True"):
        trainer(jobs, memory=room(jobs, 1.0) + beside(jobs, forward)).run(forward, 1)
    assert made == []
