"""Data, losses and models that do not repeat their values are named."""

from __future__ import annotations

import random
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runs
import torch
from arraypipe_models import sgd
from runs import array_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from optsched.arraypipe import ArrayTrainer, Job, RunConfig
from optsched.arraypipe.plan.orders import random_schedule
from optsched.arraypipe.train_alone import NotIdentical, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLASSES = 5


def classes(draw: torch.Generator, n: int) -> Tensor:
    """A class for every sample."""
    return torch.randint(0, CLASSES, (n,), generator=draw)


class Noise(torch.utils.data.Dataset[Any]):
    """Adds noise of a generator of its own."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """A noisy sample."""
        return torch.full((6,), float(k)) + torch.randn(6, generator=self.draw), torch.tensor(k % 5)


def of_draw(draw: Callable[[], float]) -> Any:
    """Batches that depend on something else than the job and the iteration."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for k in range(start, 99):
            yield torch.full((8, 6), float(draw() + k)), torch.arange(8) % CLASSES

    return batches


def plain(job: Job, start: int) -> Iterator[Any]:
    """Batches as they should be."""
    for k in range(start, 99):
        draw = torch.Generator().manual_seed(k)
        yield torch.randn(8, 6, generator=draw), classes(draw, 8)


class Counting(nn.Module):
    """Scales by what it counts; every kind of state that is no buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps, self.decay, self.seen = kind, 0, 1.0, False
        self.row: list[float] = [0.0]
        self.queue: deque[float] = deque([0.0], maxlen=3)
        self.stats, self.average = {"calls": 0}, torch.zeros(())
        self.numbers = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        """Use it, and go on with it."""
        if self.kind == "steps":
            self.steps += 1
        elif self.kind == "decay":
            self.decay *= 0.9
        elif self.kind == "row":
            self.row.append(self.row[-1] + 1)
        elif self.kind == "queue":
            self.queue.append(self.queue[-1] + 1)
        elif self.kind == "stats":
            self.stats["calls"] += 1
        elif self.kind == "average":
            self.average = self.average + x.detach().mean() + 1
        elif self.kind == "seen" and not self.seen:
            self.seen, self.decay = True, 2.0
        drawn = {"random": random.random, "numbers": self.numbers.random}
        drawn["numpy"] = np.random.rand
        more = drawn.get(self.kind, float)()
        counts = self.steps + self.row[-1] + self.queue[-1] + self.stats["calls"]
        return x * (self.decay + counts + self.average + more)


def counted(kind: str = "") -> Any:
    """A model with a layer that counts."""
    return lambda: nn.Sequential(nn.Linear(6, 15), Counting(kind), nn.Linear(15, 15))


def unseeded() -> nn.Module:
    """Weights that the seed does not give."""
    model = nn.Linear(6, 15)
    nn.init.constant_(model.weight, NUMPY.random())
    return nn.Sequential(model, nn.Linear(15, 15))


def drawing(draw: Callable[[], Any]) -> Any:
    """A loss that draws a weight."""
    return lambda y, target: F.cross_entropy(y, target) * (1 + float(draw()))


NUMPY = np.random.default_rng(0)
GLOBAL = "%s depends on the global random numbers of '%s'"
STATE = "gives other values when called again"
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "dataset with a generator": ({"data": Noise()}, f"data {STATE}"),
    "data, torch": (
        {"data": of_draw(lambda: float(torch.rand(())))},
        GLOBAL % ("data", "torch"),
    ),
    "loss, numpy": (
        {"loss": drawing(np.random.rand)},
        GLOBAL % ("loss", "numpy"),
    ),
    "model, numpy": ({"model": counted("numpy")}, GLOBAL % ("the forward", "numpy")),
    "weights": ({"model": unseeded}, f"build_model {STATE}"),
    "model, counter": (
        {"model": counted("steps")},
        "the forward, which changes 'steps' of Counting, gives",
    ),
}


@pytest.mark.filterwarnings("ignore:loss:UserWarning")
@pytest.mark.parametrize("name", CAUSES)
def test_not_identical_names_the_cause(name: str) -> None:
    """Data, loss, model, or its making; and the kind of state."""
    given, sentence = CAUSES[name]
    row = {"data": plain, "loss": F.cross_entropy, "model": counted()} | given
    jobs = [
        Job(j, 8, sgd, recompute=name == "model, counter", microbatches=1 + ("random" in name))
        for j in range(3)
    ]
    made = ArrayTrainer(row["model"], row["data"], stages=[1], loss=row["loss"])
    order = random_schedule([job.microbatches for job in jobs], 2)
    with pytest.raises(NotIdentical, match=f"(?s); job job0: .*{sentence}"):
        made.fit(jobs, 3, schedule=order, config=RunConfig(verbose=False))


@pytest.mark.parametrize("kind", ["row", "stats", "average", "none"])
def test_checkpoint_warns_of_attributes(kind: str, tmp_path: Path) -> None:
    """Once, by name; not if nothing changes, and not without checkpoints."""
    jobs = [Job(j, 8, sgd) for j in range(2)]
    made = array_trainer(counted(kind), plain, jobs=jobs, stages=[1], loss=F.cross_entropy)
    order = random_schedule([1, 1], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(made, order, 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = runs.run(made, order, 2, checkpoint=tmp_path)
    named = [str(one.message) for one in found if "no checkpoint keeps" in str(one.message)]
    assert len(named) == (kind != "none")
    if named:
        assert f"'{kind}'" in named[0] and "of Counting '1'" in named[0]
        for j in range(2):  # the look at the first forward has changed nothing
            assert differences(result.trained[j], made.train_alone(j, 2)) == []


def test_caches_are_no_state(tmp_path: Path) -> None:
    """What a forward stores without going on with it is not warned of."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[int, Tensor] = {}
            self.mask: Tensor | None = None
            self.sizes: set[int] = set()
            self.limit, self.names = 8, ["a"]

        def forward(self, x: Tensor) -> Tensor:
            """Fill caches."""
            self.table[x.shape[0]] = self.mask = torch.ones(x.shape[1])
            self.sizes.add(x.shape[0])
            self.limit = max(self.limit, x.shape[0])
            return x * self.mask

    made = array_trainer(
        lambda: nn.Sequential(nn.Linear(6, 15), Caching()), plain, jobs=[Job(0, 8, sgd)],
        stages=[1], loss=F.cross_entropy,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(made, random_schedule([1], 2), 1, checkpoint=tmp_path)
