"""Uneven shares of a data set under DistributedDataParallel: plan of steps and loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer, one_of

try:
    import torch
    from torch.utils._pytree import tree_map
    from torch.utils.data import DataLoader, TensorDataset
except ImportError:
    raise MissingExtra("sampling for DistributedDataParallel", "torch") from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.elastic.micro import IntArray

_MOST: Final = 2**40
_MOST_SEED: Final = 2**32 - 1
_SHARDS, _PASS, _ORDER, _WORKERS = range(4)  # random streams


@dataclass(frozen=True)
class StepPlan:
    """Plan how many samples every rank computes in every step of a pass over the data.

    `counts` are N_r, the samples of every rank in the pass, integers >= 0 and not all 0; `batches`
    are b_r, the most samples of a rank in a step, integers >= 1; else it is an `InputError`.

    Every rank makes all steps, with an empty batch if need be. Sizes of a rank differ by at most 1,
    and so do totals. The mean over ranks, DistributedDataParallel's gradient, is that of the mean
    loss over all samples of the step if every rank multiplies its summed loss by `sum_scale`.

    Examples
    --------
    >>> plan = optsched.elastic.StepPlan(counts=(6, 2), batches=(3, 1))
    >>> plan.steps, plan.size(0, 0), plan.sum_scale(0)
    (2, 3, 0.5)
    """

    counts: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = _integers("counts", self.counts, 0)
        batches = _integers("batches", self.batches, 1)
        if not any(counts):
            raise InputError("counts: all are 0, give a rank some")
        if len(counts) != len(batches):
            raise InputError(f"batches: expected {len(counts)}, as many as counts: {len(batches)}")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "batches", batches)

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""
        return len(self.counts)

    @cached_property
    def steps(self) -> int:
        """K, steps of every rank: max ceil(N_r / b_r)."""
        return max(-(-n // b) for n, b in zip(self.counts, self.batches, strict=True))

    def size(self, rank: int, step: int) -> int:
        """n_r, samples of a rank in a step; can be 0."""
        r = integer("rank", rank, 0, self.ranks - 1)
        return int(_size(self.counts, r, integer("step", step, 0, self.steps - 1), self.steps))

    def total(self, step: int) -> int:
        """Samples of all ranks in a step, at least 1."""
        k = integer("step", step, 0, self.steps - 1)
        return int(_share(sum(self.counts), k, self.steps))

    def sum_scale(self, step: int) -> float:
        """R / total, for a *summed* loss; safe with empty batches, whose summed loss is 0."""
        return self.ranks / self.total(step)


class VariableBatchLoader:
    """Load the batches of one rank, as a plan says, each with the factor for its summed loss.

    Iterating gives ``(batch, scale)`` once a step: a batch as of torch's DataLoader, maybe with 0
    samples in it; call backward on ``scale * summed loss``. The order depends on the arguments
    alone: not on any global random state, platform or version. Others are an `InputError`.

    Parameters
    ----------
    dataset, plan
        Data with a length and indices, and the plan of all ranks; the counts of a partition add up
        to the data.
    rank, epoch, seed
        This rank, the number of the pass, and the seed of all shuffling, the same on all ranks.
    exposure
        ``"partition"``: every sample once in a pass, by one of the ranks. What all ranks together
        compute in a step then depends on seed, epoch, data and number of steps only.
        ``"resample"``: every rank draws from a fixed shard, 1/R of the data. Fewer draws than
        samples rotate through the shard, pass after pass; more draw each floor or ceil times.
    options
        Of torch's DataLoader, such as num_workers, pin_memory, collate_fn; its processes are seeded
        by seed, epoch and rank, unless a generator is given.

    Examples
    --------
    >>> from optsched.elastic import StepPlan, VariableBatchLoader
    >>> loader = VariableBatchLoader(range(8), StepPlan((6, 2), (3, 1)), rank=0)
    >>> [(batch.tolist(), scale) for batch, scale in loader]
    [([2, 4, 7], 0.5), ([0, 6, 3], 0.5)]
    """

    def __init__(
        self, dataset: Any, plan: StepPlan, rank: int, *, epoch: int = 0, seed: int = 0,
        exposure: str = "partition", **options: Any,
    ) -> None:  # fmt: skip
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            got = type(dataset).__name__
            raise InputError(f"dataset: expected data with indices and a length, got {got}")
        self.samples = integer("dataset: its length", len(dataset), 1, _MOST)
        self.exposure = one_of("exposure", exposure, ("partition", "resample"))
        self.seed = integer("seed", seed, 0, _MOST_SEED)
        self.epoch = integer("epoch", epoch, 0, _MOST_SEED)
        self.plan, self.rank = self._fitting(plan, rank), rank
        self.pointers = (0,) * plan.ranks
        whole = type(dataset) is TensorDataset and not any(options.values())
        self._tensors = dataset.tensors if whole else None
        self._lists: list[list[int]] = []
        self._random = torch.Generator()
        options = {"generator": self._random, **options}
        try:
            self._loader = DataLoader(dataset, batch_sampler=self._lists, **options)
        except (TypeError, ValueError) as error:
            raise InputError(f"options of torch's DataLoader: {error}") from None

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        for k, (batch, samples) in enumerate(self.steps()):
            yield batch if samples else emptied(batch), self.plan.sum_scale(k)

    def steps(self, first: int = 0, share: tuple[int, int] | None = None) -> Iterator[Any]:
        """Batches from step `first` on, with their numbers of samples.

        With ``share=(rank, ranks)`` the samples of all ranks of the plan in a step are divided
        equally among other `ranks`: the sums over a step stay the same. A batch of 0 samples is
        given as one of a single sample, which has its types and shapes.
        """
        ranks = self.plan.ranks
        if share is None or share[1] == ranks:
            parts = self._parts(self.rank)
        else:
            steps = zip(*map(self._parts, range(ranks)), strict=True)
            parts = [np.array_split(np.concatenate(step), share[1])[share[0]] for step in steps]
        lists = [part.tolist() for part in parts[first:]]
        return zip(self._fetched([found or [0] for found in lists]), map(len, lists), strict=True)

    def order(self, rank: int | None = None) -> IntArray:
        """All indices of a rank (default: this one) in the pass, shape (counts[rank],)."""
        r, counts, steps = self.rank if rank is None else rank, self.plan.counts, self.plan.steps
        if self.exposure == "resample":
            shard = _permutation(self.samples, _SHARDS, self.seed)[r :: len(counts)]
            drawn = (self.pointers[r] + np.arange(counts[r])) % len(shard)
            return shard[drawn][_permutation(counts[r], _ORDER, self.seed, self.epoch, r)]
        step, before = np.arange(steps), sum(counts[:r])
        total, ahead = (_share(n, step, steps) for n in (self.samples, before))
        size = _size(counts, r, step, steps)
        begin = np.cumsum(total) - total + ahead - (np.cumsum(size) - size)
        place = np.repeat(begin, size) + np.arange(counts[r])
        return _permutation(self.samples, _PASS, self.seed, self.epoch)[place]

    def set_epoch(self, epoch: int, plan: StepPlan | None = None) -> None:
        """Advance to a pass, maybe with another plan.

        Shards are rotated by the counts of the earlier passes, and start anew if the number of
        ranks changes. A number below the current one is an InputError.
        """
        new = integer("epoch", epoch, 0, _MOST_SEED)
        if new < self.epoch:
            raise InputError(f"epoch: {new} comes before {self.epoch}: make a new loader")
        taken = self.plan if plan is None else self._fitting(plan, self.rank)
        if taken.ranks != self.plan.ranks:
            self.pointers = (0,) * taken.ranks
        elif self.exposure == "resample":
            passes, counts = new - self.epoch, self.plan.counts
            self.pointers = tuple(
                (self.pointers[r] + passes * n) % len(range(r, self.samples, len(counts)))
                for r, n in enumerate(counts)
            )
        self.epoch, self.plan = new, taken

    def _fitting(self, plan: Any, rank: Any) -> StepPlan:
        if not isinstance(plan, StepPlan):
            raise InputError(f"plan: expected a StepPlan(counts, batches), got {plan!r:.60}")
        integer("rank", rank, 0, plan.ranks - 1)
        if self.exposure == "partition" and sum(plan.counts) != self.samples:
            raise InputError(
                f"counts: they add up to {sum(plan.counts)}, but the data have {self.samples} "
                'samples: make them equal, or set exposure="resample"'
            )
        if self.samples < plan.ranks and self.exposure == "resample":
            raise InputError(f"counts: more ranks than data, {self.samples} samples: use fewer")
        return plan

    def _parts(self, rank: int) -> list[IntArray]:
        """Indices of a rank of the plan by step."""
        sizes = [self.plan.size(rank, k) for k in range(self.plan.steps)]
        return np.split(self.order(rank), np.cumsum(sizes)[:-1])

    def _fetched(self, lists: list[list[int]]) -> Iterator[Any]:
        if self._tensors is not None:
            return ([t[torch.tensor(found)] for t in self._tensors or ()] for found in lists)
        self._lists[:] = lists
        seed = np.random.SeedSequence((_WORKERS, self.seed, self.epoch, self.rank))
        self._random.manual_seed(int(np.random.PCG64(seed).random_raw() >> 1))
        return iter(self._loader)


def emptied(batch: Any) -> Any:
    """Return the same structure without samples."""
    arrays = (torch.Tensor, np.ndarray)
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # such as BatchEncoding
        batch = dict(batch)
    return tree_map(lambda x: x[:0] if isinstance(x, arrays) and x.ndim else x, batch)


def _share(count: Any, step: Any, steps: int) -> Any:
    """Share of a step in a count spread over so many steps; the first get the remainder."""
    return (count + steps - 1 - step) // steps


def _size(counts: tuple[int, ...], rank: int, step: Any, steps: int) -> Any:
    """Samples of a rank in a step; a rank's remainder starts where the previous rank's ended."""
    first = sum(counts[:rank])
    return _share(first + counts[rank], step, steps) - _share(first, step, steps)


def _permutation(size: int, *key: int) -> IntArray:
    """Sort raw random integers: NumPy promises that these never change."""
    random = np.random.PCG64(np.random.SeedSequence(key))
    return np.argsort(random.random_raw(size), kind="stable")


def _integers(name: str, given: Any, least: int) -> tuple[int, ...]:
    try:
        items = () if isinstance(given, (str, bytes, Mapping, set)) else tuple(given)
    except TypeError:
        items = ()
    if not items:
        raise InputError(f"{name}: expected a list of integers, one a rank, got {given!r:.60}")
    return tuple(integer(f"{name}: rank {r}", x, least, _MOST) for r, x in enumerate(items))
