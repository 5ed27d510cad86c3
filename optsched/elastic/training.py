"""One worker's part of one job: build, restore, train a pass, validate, checkpoint."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.elastic.micro import uncertainty
from optsched.errors import InputError, MissingExtra

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from torch.utils.data import default_collate

    from optsched.arraypipe.checkpoint.plain import python_numbers
    from optsched.elastic.checkpoint import (
        Checkpoint,
        Position,
        check_counters,
        counters,
        random_state,
        seed_all,
        set_random_state,
    )
    from optsched.elastic.meter import means_of, sums_of
    from optsched.elastic.objective import IGNORED, Batch, Objective, batch_on
    from optsched.elastic.sampling import StepPlan, VariableBatchLoader, emptied
except ImportError:
    raise MissingExtra("elastic training", "torch") from None

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.elastic.job import TrainingJob
    from optsched.elastic.workers import Join, Order, StopSign

_PATIENCE: Final = timedelta(seconds=600)  # deaths of ranks are found by the scheduler


class Member:
    """A rank of a job between two changes of its workers; weights stay in memory between passes.

    `data` is the result of ``job.data()``; ranks find each other by the store. Random numbers of a
    pass depend on (seed, pass, rank) alone, so a pass that is repeated after a crash gives the same
    bits; one that was stopped continues the random streams.
    """

    def __init__(
        self, job: TrainingJob, join: Join, data: tuple[Any, Any], store: Any = None
    ) -> None:
        self.job, self.join, self.device = job, join, torch.device(join.device)
        self.data = data
        if not len(data[1]):
            raise InputError("data: there are no validation data")
        self.checkpoint = Checkpoint(job, join.folder, self.device)
        self.model, self.optimizer, self.scheduler = self.checkpoint.trained
        self.objective = Objective(job)
        self.log: list[dict[str, Any]] = []
        self.position: Position | None = None
        if not self.checkpoint.file.exists():
            self.checkpoint.check_kept()
        else:
            self.log, self.position = self.checkpoint.restore()
            if len(self.log) not in (join.done, join.done + 1):
                after = f"was written after {len(self.log)} passes, not {join.done}"
                raise InputError(f"{self.checkpoint.file}: {after}")
        self.loader: VariableBatchLoader | None = None
        self.sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        """Of the pass so far: `sums_of` its predictions, loss and number of targets."""
        self.ddp: Any = self.model
        if join.workers > 1:
            gpu = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=dist.PrefixStore(join.store, store),  # type: ignore[attr-defined]
                rank=join.rank, world_size=join.workers, timeout=_PATIENCE,
            )  # fmt: skip
            self.ddp = DistributedDataParallel(self.model, [self.device] if gpu else None)
            self._fix_buckets()

    def _fix_buckets(self) -> None:
        """Run one sample forward and backward without a step: buckets are laid out anew after it.

        Sums of three or more ranks depend on the layout, so a restart would change bits.
        """
        batch = batch_on(self.device, (self.job.collate or default_collate)([self.data[0][0]]), 1)
        self.ddp.eval()
        out = batch.inputs.call(self.ddp)
        torch.autograd.backward(self.objective.total(batch, out)[0] * 0.0)
        self.optimizer.zero_grad()

    def joined(self) -> tuple[int, float, dict[str, Any] | None, Any]:
        """Size of the data, learning rate, a record that the scheduler lacks, order and part."""
        settings, where = self.checkpoint.made["settings"], self.position
        missing = self.log[-1] if len(self.log) > self.join.done else None
        open_pass = None if where is None else (where.order, where.part)
        return len(self.data[0]), float(settings[0]["lr"]), missing, open_pass

    def train(self, order: Order, stop: StopSign | None = None) -> dict[str, Any] | float:
        """Train one pass (Algorithm 1 of the paper, lines 4-8 and 16-20) and return its record.

        The record has the lists ``samples, batches, entropy, margin`` by rank, the ``rate`` factor,
        U (26) as ``uncertainty``, the mean training ``loss`` and the validation ``metric``. A pass
        that `stop` ends returns the part that is done, in [0, 1], and continues in the next call.
        Rank 0 has written the checkpoint then.
        """
        plan = StepPlan(tuple(order.samples), tuple(order.batches))
        first = 0 if self.position is None else self.position.step
        batches = self._loader(order, plan).steps(first, (self.join.rank, self.join.workers))
        self.model.train()
        self._begin(order)
        before = counters(self.model)
        for k in range(first, plan.steps):
            if stop is not None and not stop.may_start(k):
                return self._stopped(order, k, plan.steps)
            given, samples = next(batches)
            self._step(given, samples, plan.total(k), order.rate)
            if k == first or k == plan.steps - 1:
                check_counters(self.model, before)
        self.position = None
        if self.join.workers != plan.ranks:
            self.loader = None  # it was that of the plan's ranks
        self.log.append(self._record(order))
        if self.join.rank == 0:
            self.checkpoint.save(self.log)
        return self.log[-1]

    def _step(self, given: Any, samples: int, total: int, factor: float) -> None:
        """One step of the optimizer on this rank's batch of a step with `total` samples."""
        batch = batch_on(self.device, given, samples)
        if not samples and not batch.keyed:  # models of dictionaries may refuse empty batches
            batch = batch_on(self.device, emptied(given), 0)
        out = batch.inputs.call(self.ddp)
        loss, count = self.objective.total(batch, out)
        if samples:
            logits, labels, axis = self.objective.predictions(batch, out)
            self.sums[:3] += sums_of(logits, labels if batch.keyed else None, axis, IGNORED)
        workers = self.join.workers
        self.optimizer.zero_grad()
        if count is None:
            torch.autograd.backward(loss * (workers / total))
            targets = torch.tensor(float(samples), dtype=torch.float64, device=self.device)
        else:
            targets = count.to(self.device)
            everywhere = self._summed(targets)
            scale = (workers / everywhere.clamp(min=1.0)).to(loss.dtype)
            torch.autograd.backward(loss * scale)
        both = torch.stack([loss.detach().to(torch.float64), targets])
        self.sums[3:] += both
        self._update(factor, both)

    def _summed(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        found = value.clone()
        if self.join.workers > 1:
            dist.all_reduce(found)
        return found

    def _update(self, factor: float, loss: Tensor) -> None:
        """Step the optimizer, its learning rates times `factor`, then the scheduler.

        In between the rates are those of the schedule: the factor does not add up in it, and a
        change that the optimizer or a hook makes stays. `loss`: sum and targets of this rank.
        """
        rows = []
        for group in self.optimizer.param_groups if factor != 1 else ():
            rows.append((group, group["lr"], group["lr"] * factor))
            group["lr"] = rows[-1][2]
        self.optimizer.step()
        for group, rate, used in rows:
            unchanged = group["lr"] is used or group["lr"] == used
            group["lr"] = rate if unchanged else group["lr"] / factor
        if isinstance(self.scheduler, ReduceLROnPlateau):  # the mean loss of the global batch
            both = self._summed(loss)
            self.scheduler.step(float(both[0] / both[1].clamp(min=1.0)))
        elif self.scheduler is not None:
            self.scheduler.step()
        python_numbers(self.optimizer, self.scheduler)

    def _begin(self, order: Order) -> None:
        """Seed the pass, or continue its streams and sums; other workers get new streams."""
        where, rank = self.position, self.join.rank
        self.sums.zero_()
        if where is None:
            seed_all(self.job.seed, order.number + 1, rank)
        elif len(where.ranks) == self.join.workers:
            self.sums.copy_(where.ranks[rank]["sums"])
            set_random_state(where.ranks[rank]["random"], self.device)
        else:
            for state in where.ranks if rank == 0 else ():
                self.sums += state["sums"].to(self.device)
            seed_all(self.job.seed, order.number + 1, rank, where.step)

    def _stopped(self, order: Order, step: int, steps: int) -> float:
        """Save the position before a step; all ranks take part."""
        mine = {"random": random_state(self.device), "sums": self.sums.cpu()}
        ranks: list[Any] = [mine] * self.join.workers
        if self.join.workers > 1:
            dist.gather_object(mine, ranks if self.join.rank == 0 else None)
        if self.join.rank == 0:
            self.checkpoint.save(self.log, Position((*order,), step, step / steps, ranks))
        return step / steps

    def _record(self, order: Order) -> dict[str, Any]:
        """The record of a pass that is complete, the same on all ranks."""
        metric = torch.tensor(self._validate(), dtype=self.sums.dtype, device=self.device)
        row = torch.cat([self.sums, metric])
        rows = [row.clone() for _ in range(self.join.workers)]
        if self.join.workers > 1:
            dist.all_gather(rows, row)
        lists = [found.tolist() for found in rows]
        *_, loss, targets, score, scored = map(sum, zip(*lists, strict=True))
        measured = [found[:3] for found in lists]
        if len(rows) != len(order.samples):  # resized within the pass: the mean for every rank
            both = [sum(column) for column in zip(*measured, strict=True)]
            measured = [both] * len(order.samples)
        means = [means_of(found)[:2] if found[2] else (0.0, 0.0) for found in measured]
        entropies, margins = map(list, zip(*means, strict=True))
        shares = np.array(order.samples) / sum(order.samples)
        alpha = (self.job.micro or {}).get("alpha", 1.0)
        return {
            "samples": [*order.samples], "batches": [*order.batches], "rate": order.rate,
            "entropy": entropies, "margin": margins,
            "uncertainty": uncertainty(shares, entropies, margins, alpha),
            "loss": loss / max(targets, 1.0), "metric": score / max(scored, 1.0),
        }  # fmt: skip

    def leave(self) -> None:
        """Free the model and leave the process group."""
        self.ddp = self.model = self.optimizer = self.loader = None
        del self.checkpoint
        gc.collect()
        if self.join.workers > 1:  # while a model holds the group, its end can block for ever
            dist.destroy_process_group()

    def _loader(self, order: Order, plan: StepPlan) -> VariableBatchLoader:
        """Return the loader at this pass; a new one repeats the plans of earlier passes."""
        job = self.job
        if self.loader is not None:
            self.loader.set_epoch(order.number, plan)
            return self.loader
        first = order.number
        while first and len(self.log[first - 1]["samples"]) == plan.ranks:
            first -= 1
        past = self.log[first : order.number]
        plans = [StepPlan(row["samples"], row["batches"]) for row in past] + [plan]
        rank = self.join.rank if self.join.workers == plan.ranks else 0
        self.loader = VariableBatchLoader(
            self.data[0], plans[0], rank, epoch=first, seed=job.seed, exposure=job.exposure,
            pin_memory=self.device.type == "cuda", collate_fn=job.collate,
        )  # fmt: skip
        for k, each in enumerate(plans[1:], first + 1):
            self.loader.set_epoch(k, each)
        return self.loader

    def _validate(self) -> tuple[float, int]:
        """Sum of the metric over this rank's share of the validation data, and its number."""
        if self.join.workers > 1:
            for buffer in self.model.buffers():  # a rank's statistics are of its batches alone
                dist.broadcast(buffer, 0)
        self.model.eval()
        ranks, data = self.join.workers, self.data[1]
        counts = tuple(len(range(r, len(data), ranks)) for r in range(ranks))
        size = max(1, self.job.batch_size // ranks) if isinstance(data[0], dict) else 256
        loader = VariableBatchLoader(
            data, StepPlan(counts, (size,) * ranks), self.join.rank, collate_fn=self.job.collate
        )
        score, scored = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with torch.inference_mode():
            for given, samples in loader.steps():
                if samples:
                    batch: Batch = batch_on(self.device, given, samples)
                    found, number = self.objective.score(batch, batch.inputs.call(self.model))
                    score, scored = score + found.to(self.device), scored + number
        return float(score), scored
