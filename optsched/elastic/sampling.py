"""Uneven shares of a data set under DistributedDataParallel: plan of steps, sampler and loader."""

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
    from torch.utils.data import DataLoader, Sampler, TensorDataset
except ImportError:
    raise MissingExtra("sampling for DistributedDataParallel", "torch") from None

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.elastic.equations import IntArray

_MOST: Final = 2**40
_WORD: Final = 2**32 - 1  # what a random stream is named by
_SHARDS, _PASS, _ORDER, _WORKERS = range(4)  # random streams


@dataclass(frozen=True)
class StepPlan:
    """How many samples every rank computes in every step of a pass over the data.

    `counts` are N_r, the samples of every rank in the pass, integers >= 0 and not all 0; `batches`
    are b_r, the most samples of a rank in a step, integers >= 1; else it is an `InputError`.

    Every rank makes all steps, with an empty batch if need be: a missing one would block the
    all-reduce of the others. Sizes of a rank differ by at most 1, and so do totals. The mean over
    ranks, DistributedDataParallel's gradient, is that of the mean loss over all samples of the step
    if every rank multiplies its summed loss by `sum_scale`, or its mean loss by `loss_scale`.
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
        """n_r, samples of a rank in a step; maybe 0."""
        r = integer("rank", rank, 0, self.ranks - 1)
        return int(_size(self.counts, r, integer("step", step, 0, self.steps - 1), self.steps))

    def total(self, step: int) -> int:
        """Samples of all ranks in a step, at least 1."""
        k = integer("step", step, 0, self.steps - 1)
        return int(_share(sum(self.counts), k, self.steps))

    def loss_scale(self, rank: int, step: int) -> float:
        """R * n_r / total, for a *mean* loss; an empty batch's mean loss is NaN, even times 0."""
        return self.ranks * self.size(rank, step) / self.total(step)

    def sum_scale(self, step: int) -> float:
        """R / total, for a *summed* loss; safe with empty batches, whose summed loss is 0."""
        return self.ranks / self.total(step)


class UnevenDistributedSampler(Sampler[int]):
    """Indices of one rank in a pass, where ranks have different numbers of samples.

    They depend on the arguments alone: not on any global random state, platform or version. An
    argument out of range is an `InputError`.

    Parameters
    ----------
    dataset
        Data with a length, or a length.
    counts
        Samples of every rank in a pass, integers >= 0, not all 0; those of a partition add up to
        the data.
    rank, epoch
        This rank, 0 <= rank < len(counts), and the number of the pass.
    seed
        Of all shuffling, the same on all ranks, 0 <= seed < 2**32.
    exposure
        ``"partition"``: every sample once in a pass, by one of the ranks. ``"resample"``: every
        rank draws from a shard of its own, 1/R of the data, for ever the same. Fewer draws than
        samples rotate through the shard, pass after pass; more draw each floor or ceil times.
    steps
        Of a partition, `StepPlan.steps`: what all ranks together compute in a step then depends on
        seed, epoch, data and `steps` only, not on counts or ranks.
    """

    def __init__(
        self, dataset: Any, counts: Sequence[int], rank: int, *, epoch: int = 0, seed: int = 0,
        exposure: str = "partition", steps: int = 1,
    ) -> None:  # fmt: skip
        self.exposure = one_of("exposure", exposure, ("partition", "resample"))
        try:
            size = dataset if isinstance(dataset, (int, np.integer)) else len(dataset)
        except (TypeError, NotImplementedError):
            got = type(dataset).__name__
            raise InputError(f"dataset: expected data with a length, got {got}") from None
        self.samples = integer("dataset: its length", size, 1, _MOST)
        self.seed = integer("seed", seed, 0, _WORD)
        self.epoch = integer("epoch", epoch, 0, _WORD)
        self.steps = integer("steps", steps, 1, _MOST)
        self.counts = self._fitting(counts)
        self.rank = integer("rank", rank, 0, len(self.counts) - 1)
        self.pointers = (0,) * len(self.counts)

    def __len__(self) -> int:
        return self.counts[self.rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def order(self) -> IntArray:
        """All indices of this rank in the pass, shape (counts[rank],)."""
        ranks, count = len(self.counts), self.counts[self.rank]
        if self.exposure == "resample":
            shard = _permutation(self.samples, _SHARDS, self.seed)[self.rank :: ranks]
            drawn = (self.pointers[self.rank] + np.arange(count)) % len(shard)
            return shard[drawn][_permutation(count, _ORDER, self.seed, self.epoch, self.rank)]
        step, before = np.arange(self.steps), sum(self.counts[: self.rank])
        total, own = (_share(n, step, self.steps) for n in (self.samples, before))
        size = _size(self.counts, self.rank, step, self.steps)
        begin = np.cumsum(total) - total + own - (np.cumsum(size) - size)
        place = np.repeat(begin, size) + np.arange(count)
        return _permutation(self.samples, _PASS, self.seed, self.epoch)[place]

    def set_epoch(
        self, epoch: int, counts: Sequence[int] | None = None, steps: int | None = None
    ) -> None:
        """Go on to a pass, maybe with other counts and steps.

        Shards are rotated by the counts of the passes gone by, and start anew if the number of
        ranks changes. A pass of the past is an InputError.
        """
        new = integer("epoch", epoch, 0, _WORD)
        if new < self.epoch:
            raise InputError(f"epoch: {new} comes before {self.epoch}: make a new sampler")
        taken = self.counts if counts is None else self._fitting(counts)
        integer("rank", self.rank, 0, len(taken) - 1)
        self.steps = self.steps if steps is None else integer("steps", steps, 1, _MOST)
        if len(taken) != len(self.counts):
            self.pointers = (0,) * len(taken)
        elif self.exposure == "resample":
            ranks, gone = len(taken), new - self.epoch
            self.pointers = tuple(
                (self.pointers[r] + gone * self.counts[r]) % len(range(r, self.samples, ranks))
                for r in range(ranks)
            )
        self.epoch, self.counts = new, taken

    def _fitting(self, given: Any) -> tuple[int, ...]:
        counts = _integers("counts", given, 0)
        if self.exposure == "partition" and sum(counts) != self.samples:
            raise InputError(
                f"counts: they add up to {sum(counts)}, but the data have {self.samples} samples: "
                'make them equal, or set exposure="resample"'
            )
        if self.samples < len(counts) and self.exposure == "resample":
            raise InputError(f"counts: more ranks than data, {self.samples} samples: use fewer")
        return counts


class VariableBatchLoader:
    """Batches of one rank, as a plan says, each with the factor for its summed loss.

    Iterating gives ``(batch, scale)`` once a step: a batch as of torch's DataLoader, maybe with 0
    samples in it; call backward on ``scale * summed loss``.

    `dataset` has a length and indices; a TensorDataset is indexed by whole batches. `plan` is that
    of all ranks; for rank, epoch, seed and exposure see `UnevenDistributedSampler`. Options are
    those of torch's DataLoader, such as num_workers, pin_memory, collate_fn; its processes are
    seeded by seed, epoch and rank, unless a generator is given. What cannot be is an `InputError`.
    """

    def __init__(
        self, dataset: Any, plan: StepPlan, rank: int, *, epoch: int = 0, seed: int = 0,
        exposure: str = "partition", **options: Any,
    ) -> None:  # fmt: skip
        self.plan = _plan(plan)
        if not hasattr(dataset, "__getitem__"):
            raise InputError(f"dataset: expected data with indices, got {type(dataset).__name__}")
        self.sampler = UnevenDistributedSampler(
            dataset, plan.counts, rank, epoch=epoch, seed=seed, exposure=exposure, steps=plan.steps
        )
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
        plan, sampler = self.plan, self.sampler
        sizes = [plan.size(sampler.rank, k) for k in range(plan.steps)]
        parts = np.split(sampler.order(), np.cumsum(sizes)[:-1])
        for k, (size, batch) in enumerate(zip(sizes, self._fetched(parts), strict=True)):
            yield batch if size else _emptied(batch), plan.sum_scale(k)

    def _fetched(self, parts: list[IntArray]) -> Iterator[Any]:
        if self._tensors is not None:
            return ([t[torch.from_numpy(i)] for t in self._tensors or ()] for i in parts)
        # an empty batch is made from a batch of one sample, which has its shapes and types
        self._lists[:] = [part.tolist() or [0] for part in parts]
        words = (_WORKERS, self.sampler.seed, self.sampler.epoch, self.sampler.rank)
        self._random.manual_seed(int(_stream(*words).random_raw() >> 1))
        return iter(self._loader)

    def set_epoch(self, epoch: int, plan: StepPlan | None = None) -> None:
        """Go on to a pass, maybe with another plan; see `UnevenDistributedSampler.set_epoch`."""
        new = self.plan if plan is None else _plan(plan)
        self.sampler.set_epoch(epoch, new.counts, new.steps)
        self.plan = new


def _share(count: Any, step: Any, steps: int) -> Any:
    """Share of a step in a count spread over so many steps: the first ones get the rest."""
    return (count + steps - 1 - step) // steps


def _size(counts: tuple[int, ...], rank: int, step: Any, steps: int) -> Any:
    """Samples of a rank in a step; one rank's rest begins where the last one's ended."""
    first = sum(counts[:rank])
    return _share(first + counts[rank], step, steps) - _share(first, step, steps)


def _stream(*words: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(words))


def _permutation(size: int, *words: int) -> IntArray:
    """By raw random words, the only ones that NumPy promises never to change."""
    return np.argsort(_stream(*words).random_raw(size), kind="stable")


def _integers(name: str, given: Any, least: int) -> tuple[int, ...]:
    try:
        items = () if isinstance(given, (str, bytes, Mapping, set)) else tuple(given)
    except TypeError:
        items = ()
    if not items:
        raise InputError(f"{name}: expected a list of integers, one a rank, got {given!r:.60}")
    return tuple(integer(f"{name}: rank {r}", x, least, _MOST) for r, x in enumerate(items))


def _plan(given: Any) -> StepPlan:
    if not isinstance(given, StepPlan):
        raise InputError(f"plan: expected a StepPlan(counts, batches), got {given!r:.60}")
    return given


def _emptied(batch: Any) -> Any:
    """The same structure without samples."""
    arrays = (torch.Tensor, np.ndarray)
    return tree_map(lambda x: x[:0] if isinstance(x, arrays) and x.ndim else x, batch)
