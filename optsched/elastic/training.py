"""One worker's part of one job: build, restore, train a pass, validate, checkpoint."""

from __future__ import annotations

import gc
import random
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.elastic.equations import uncertainty
from optsched.elastic.meter import EntropyMeter
from optsched.elastic.sampling import StepPlan, VariableBatchLoader
from optsched.errors import InputError, MissingExtra

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from optsched.arraypipe.checkpoint.files import check_plain, copied, load, replace_file
except ImportError:
    raise MissingExtra("elastic training", "torch") from None

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.elastic.job import TrainingJob
    from optsched.elastic.workers import Join, Order

FORMAT: Final = "optsched.elastic/1"
_PATIENCE: Final = timedelta(seconds=600)  # for the others: who dies is found by the scheduler


class Member:
    """A rank of a job between two changes of its workers; weights stay in memory from pass to pass.

    `data` is what ``job.data()`` has returned. Random numbers of a pass depend on (seed, pass,
    rank) alone, so a pass that is done again after a crash gives the same bits.
    """

    def __init__(self, job: TrainingJob, join: Join, data: tuple[Any, Any]) -> None:
        self.job, self.join, self.device = job, join, torch.device(join.device)
        self.train_data, self.validation = data
        if not len(self.validation):
            raise InputError("data: there are no validation data")
        seed_all(job.seed, 0, 0)
        self.model = job.model().to(self.device)
        self.optimizer = job.optimizer(self.model.parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.log: list[dict[str, Any]] = []
        self.untold: dict[str, Any] | None = None  # of a pass that was saved, but not told
        self.file = Path(join.folder) / "checkpoint.pt"
        if self.file.exists():
            self._restore()
        self.ddp: Any = self.model
        if join.workers > 1:
            gpu = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=dist.FileStore(join.store, join.workers),  # type: ignore[attr-defined]
                rank=join.rank, world_size=join.workers, timeout=_PATIENCE,
            )  # fmt: skip
            self.ddp = DistributedDataParallel(self.model, [self.device] if gpu else None)
        self.loss = job.loss or _cross_entropy
        self.metric = job.metric or _right
        self.loader: VariableBatchLoader | None = None

    def train(self, order: Order) -> dict[str, Any]:
        """One pass (Algorithm 1 of the paper, lines 4-8 and 16-20); its record.

        The record has the lists ``samples, batches, entropy, margin`` by rank, the ``rate`` factor,
        U (26) as ``uncertainty``, the mean training ``loss`` and the validation ``metric``. Rank 0
        has written the checkpoint when it returns.
        """
        loader = self._loader(order)
        seed_all(self.job.seed, order.number + 1, self.join.rank)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * order.rate
        self.model.train()
        meter: EntropyMeter | None = None
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for (x, y), scale in loader:
            out = self.ddp(x.to(self.device))
            if meter is None:
                meter = EntropyMeter(out.shape[1], margin=True, dim=1)
            meter.update(out)
            total = self.loss(out, y.to(self.device))
            self.optimizer.zero_grad()
            (total * scale).backward()
            self.optimizer.step()
            loss += total.detach()
        entropy, margin = 0.0, None
        if meter is not None and order.samples[self.join.rank]:
            entropy, margin, _ = meter.compute()
        rows = self._gathered([entropy, margin or 0.0, float(loss), *self._validate()])
        entropies, margins, losses, scores, counts = map(list, zip(*rows, strict=True))
        record = {
            "samples": [*order.samples], "batches": [*order.batches], "rate": order.rate,
            "entropy": entropies, "margin": margins,
            "uncertainty": self._uncertainty(order, entropies, margins),
            "loss": sum(losses) / sum(order.samples),
            "metric": sum(scores) / max(sum(counts), 1.0),
        }  # fmt: skip
        self.log.append(record)
        if self.join.rank == 0:
            self._save(order.number + 1)
        return record

    def _uncertainty(self, order: Order, entropies: list[float], margins: list[float]) -> float:
        """U (26) of a pass, by the shares of its samples."""
        shares = np.array(order.samples) / sum(order.samples)
        if not self.job.micro:
            return float(shares @ entropies)
        printed, alpha = (self.job.micro.get(key) for key in ("as_printed", "alpha"))
        alpha = 1.0 if alpha is None else alpha
        return uncertainty(shares, entropies, margins, alpha, as_printed=bool(printed))

    def leave(self) -> None:
        """Be free for another job."""
        self.ddp = self.model = self.optimizer = self.loader = None
        gc.collect()
        if self.join.workers > 1:  # while a model holds the group, its end can block for ever
            dist.destroy_process_group()

    def _loader(self, order: Order) -> VariableBatchLoader:
        """The loader at this pass; a fresh one is led through the past, to draw on from there."""
        job, join, plan = self.job, self.join, _plan(order._asdict())
        if self.loader is None:
            first = order.number
            while first and len(self.log[first - 1]["samples"]) == join.workers:
                first -= 1
            plans = [_plan(self.log[k]) for k in range(first, order.number)] + [plan]
            self.loader = VariableBatchLoader(
                self.train_data, plans[0], join.rank, epoch=first, seed=job.seed,
                exposure=job.exposure, pin_memory=self.device.type == "cuda",
            )  # fmt: skip
            for k, each in enumerate(plans[1:], first + 1):
                self.loader.set_epoch(k, each)
        else:
            self.loader.set_epoch(order.number, plan)
        return self.loader

    def _validate(self) -> tuple[float, float]:
        """Sum of the metric over this rank's share of the validation data, and their number."""
        if self.join.workers > 1:
            for buffer in self.model.buffers():  # a rank's own statistics are of its own batches
                dist.broadcast(buffer, 0)
        self.model.eval()
        ranks, size = self.join.workers, len(self.validation)
        plan = StepPlan(tuple(len(range(r, size, ranks)) for r in range(ranks)), (256,) * ranks)
        score = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.inference_mode():
            for (x, y), _ in VariableBatchLoader(self.validation, plan, self.join.rank):
                found = self.metric(self.model(x.to(self.device)), y.to(self.device))
                if found.shape[:1] != x.shape[:1]:
                    got = tuple(found.shape)
                    raise InputError(f"metric: expected a number for each of {len(x)}, got {got}")
                score += found.sum(dtype=torch.float64) / max(found[:1].numel(), 1)
        return float(score), float(plan.counts[self.join.rank])

    def _gathered(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, on each."""
        if self.join.workers == 1:
            return [row]
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.join.workers)]
        dist.all_gather(rows, mine)
        return [found.tolist() for found in rows]

    def _save(self, done: int) -> None:
        state = copied({
            "format": FORMAT, "job": self.job.name, "passes": done, "log": self.log,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
        })  # fmt: skip
        check_plain(state, f"checkpoint of job {self.job.name}")
        replace_file(self.file, state)

    def _restore(self) -> None:
        state = read_checkpoint(self.file, self.job.name)
        if state["passes"] == self.join.done + 1:
            self.untold = state["log"][-1]
        elif state["passes"] != self.join.done:
            raise InputError(
                f"{self.file}: was written after {state['passes']} passes, not {self.join.done}"
            )
        try:
            kept = [group.keys() for group in state["optimizer"]["param_groups"]]
            if kept != [group.keys() for group in self.optimizer.param_groups]:
                raise ValueError("other settings of the optimizer")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise InputError(f"{self.file}: is of another model or optimizer ({line})") from None
        self.log = state["log"]


def read_checkpoint(file: Path | str, name: str) -> dict[str, Any]:
    """A job's ``passes``, ``log``, ``model`` and ``optimizer``; `InputError`: no such file."""
    state: Any = load(Path(file))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{file}: is no checkpoint of format {FORMAT}")
    keys = {"job", "passes", "log", "model", "optimizer"}
    if not keys <= state.keys() or not isinstance(state["log"], list):
        raise InputError(f"{file}: is damaged")
    if state["job"] != name or len(state["log"]) != state["passes"]:
        raise InputError(f"{file}: is of job {state['job']!r}, expected {name!r}")
    return state


def _plan(given: dict[str, Any]) -> StepPlan:
    return StepPlan(tuple(given["samples"]), tuple(given["batches"]))


def seed_all(*key: int) -> None:
    """Seed torch, Python and NumPy by some numbers."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (of user code)


def _cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, target, reduction="sum")


def _right(out: Tensor, target: Tensor) -> Tensor:
    return out.argmax(1) == target
