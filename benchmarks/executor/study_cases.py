"""What the ArrayPipe study compares: 64 sibling jobs of a model on a cluster, under assumptions."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

from optsched import JobArray
from optsched.errors import InputError
from optsched.pipelines import models
from optsched.pipelines.generator import BATCH_SIZES

MODELS: Final = ("vgg19", "resnet152", "bert_large", "gpt2_xl")

ASSUMPTIONS: Final = {
    "base": "recomputation and micro-batches as they do best, on both sides",
    "never": "nobody recomputes",
    "always": "everybody recomputes",
    "one block": "the array runs every job as one micro-batch",
    "m = S": "a baseline runs S micro-batches, whatever their size",
    "efficient": "small micro-batches are as efficient as large ones (β½ = 0)",
    "free switches": "changing the job takes no time",
    "workspace": "recomputing needs room for the activations of the stage",
    "no limit": "unlimited memory",
    "naive": "stages of equally many layers",
}
"""One changed at a time."""


@dataclass(frozen=True)
class Case:
    """A model and a cluster; `per_server` devices share a server, InfiniBand joins servers."""

    model: str
    stages: int = 8
    link: str = "nvlink"
    memory: str = "80GB"
    per_server: int = 0
    assumption: str = "base"
    jobs: int = 64

    def batch_sizes(self, seed: int) -> list[int]:
        """Samples of every job: equal shares, shuffled."""
        kinds = BATCH_SIZES[self.model]
        sizes = [kinds[j % len(kinds)] for j in range(self.jobs)]
        random.Random(seed).shuffle(sizes)
        return sizes

    def array(self, sizes: list[int], **options: Any) -> JobArray:
        """The jobs as an array; two buffers of model state on every device."""
        given = {"switch": self.assumption != "free switches"}
        return self._laid_out(sizes, **{**given, **options})

    def single(self, size: int, **options: Any) -> JobArray:
        """One job that has the devices for itself: one buffer of model state."""
        job = self._laid_out([size], **options)
        state = np.zeros(job.n_devices, np.int64)
        np.add.at(state, job.devices_of(0), job.state[0])
        return job.replace(memory=np.where(job.memory > 0, job.memory + state, 0))

    def _laid_out(
        self, sizes: list[int], *, chunks: tuple[int, ...] = (), **options: Any
    ) -> JobArray:
        place = chunks or tuple(range(self.stages))
        model = models.model_of(self.model)
        if self.assumption == "efficient":
            model = replace(model, half_batch=Fraction(0))
        common = {
            "place": place,
            "memory": None if self.assumption == "no limit" else self.memory,
            "partition": "naive" if self.assumption == "naive" else "balanced",
            "recompute_workspace": self.assumption == "workspace",
        }
        given = {**common, **options}
        array = _from_profile(model, self.link, tuple(sizes), tuple(given.items()))
        if not self.per_server:
            return array
        slow = _from_profile(model, "infiniband", tuple(sizes), tuple(given.items()))
        leaves = [a // self.per_server != b // self.per_server for a, b in pairwise(place)]
        return array.replace(
            lag_forward=np.where(leaves, slow.lag_forward, array.lag_forward),
            lag_backward=np.where(leaves, slow.lag_backward, array.lag_backward),
            servers=[f"server{d // self.per_server}" for d in range(self.stages)],
        )

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """Ways of recomputing that are allowed."""
        chosen = self.assumption in ("never", "always")
        return (self.assumption,) if chosen else ("never", "always")

    @property
    def words(self) -> str:
        """The model, and what differs from the base."""
        plain = asdict(Case(self.model))
        changed = [f"{key} {value}" for key, value in asdict(self).items() if plain[key] != value]
        return ", ".join([self.model, *changed])

    @property
    def exists(self) -> bool:
        """Whether the model has a layer for every stage and its state fits twice."""
        try:
            self.array([BATCH_SIZES[self.model][0]])
        except InputError:
            return False
        return True

    @property
    def state_bytes(self) -> int:
        """Model state of one job."""
        return int(self.array([BATCH_SIZES[self.model][0]]).state.sum())


def sweeps() -> dict[str, dict[str, Case]]:
    """Cases by sweep and its label, for a model named ``""``."""
    base = Case("")
    return {
        "base": {"": base},
        "servers": {
            f"{n} x {size}": replace(base, stages=n * size, per_server=size if n > 1 else 0)
            for size in (4, 8)
            for n in (1, 2, 4)
        },
        "memory": {size: replace(base, memory=size) for size in ("16GB", "24GB", "40GB", "80GB")},
        "bandwidth": {link: replace(base, link=link) for link in ("nvlink", "pcie", "infiniband")},
        "stages": {str(s): replace(base, stages=s) for s in (4, 8, 12, 16)},
        "assumptions": {name: replace(base, assumption=name) for name in ASSUMPTIONS},
    }


@lru_cache(maxsize=1000)  # several pipelines run the same job
def _from_profile(
    model: models.Model, link: str, sizes: tuple[int, ...], options: tuple[tuple[str, Any], ...]
) -> JobArray:
    given = dict(options)
    return JobArray.from_profile(model, len(given["place"]), sizes, link=link, **given)
