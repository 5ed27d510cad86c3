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
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from optsched.arraypipe.checkpoint.files import copied, load, replace_file
    from optsched.arraypipe.checkpoint.plain import (
        check_kept,
        empty,
        kept,
        python_numbers,
        python_settings,
        reread,
    )
    from optsched.arraypipe.checkpoint.states import check_same, scheduler_state
    from optsched.arraypipe.model.inputs import same
except ImportError:
    raise MissingExtra("elastic training", "torch") from None

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.elastic.job import TrainingJob
    from optsched.elastic.workers import Join, Order

FORMAT: Final = "optsched.elastic/2"
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
        self.optimizer: Any = python_settings(job.optimizer(self.model.parameters()))
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        settings = [  # the scheduler changes them
            copied({key: value for key, value in group.items() if not key.startswith("param")},
                   f"{self._place}: optimizer setting")
            for group in self.optimizer.param_groups
        ]  # fmt: skip
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)
        python_numbers(self.optimizer, self.scheduler)
        schedule = scheduler_state(self.scheduler, job.name)
        self.made: dict[str, Any] = {
            "optimizer": _kind(self.optimizer),
            "settings": settings,
            "scheduler": _kind(self.scheduler),
            "schedule": copied(schedule, f"{self._place}: scheduler"),
        }
        self.log: list[dict[str, Any]] = []
        self.untold: dict[str, Any] | None = None  # of a pass that was saved, but not told
        self.file = Path(join.folder) / "checkpoint.pt"
        if self.file.exists():
            self._restore()
        else:
            self._check_kept()
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
            self._step(order.rate, total.detach(), len(y))
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

    def _step(self, factor: float, loss: Tensor, samples: int) -> None:
        """A step of the optimizer, its learning rates times `factor`, then one of the scheduler.

        In between the rates are those of the schedule: the factor does not add up in it, and a
        change that the optimizer or a hook makes stays.
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
            both = torch.tensor([float(loss), samples], dtype=torch.float64, device=self.device)
            if self.join.workers > 1:
                dist.all_reduce(both)
            self.scheduler.step(float(both[0] / both[1]))
        elif self.scheduler is not None:
            self.scheduler.step()
        python_numbers(self.optimizer, self.scheduler)

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

    @property
    def _place(self) -> str:
        return f"checkpoint of job {self.job.name}"

    def _state(self, done: int) -> dict[str, Any]:
        return {
            "format": FORMAT, "job": self.job.name, "passes": done, "log": self.log,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler_state(self.scheduler, self.job.name),
            "made": self.made,
        }  # fmt: skip

    def _check_kept(self) -> None:
        """Find state that no checkpoint can keep before the first pass."""
        reread(kept(self._state(0), self._place, empty))
        job = self.job
        check_kept(job.optimizer, job.scheduler, [*self.model.parameters()], self._place)

    def _save(self, done: int) -> None:
        replace_file(self.file, copied(self._state(done), self._place))

    def _restore(self) -> None:
        state = read_checkpoint(self.file, self.job.name)
        if state["passes"] == self.join.done + 1:
            self.untold = state["log"][-1]
        elif state["passes"] != self.join.done:
            raise InputError(
                f"{self.file}: was written after {state['passes']} passes, not {self.join.done}"
            )
        try:
            before, now = state["made"], self.made
            self.model.load_state_dict(state["model"])
            for key in ("optimizer", "scheduler"):
                check_same({key: before[key]}, {key: now[key]}, "{}", self.file)
            self.optimizer.load_state_dict(state["optimizer"])
            self._uncast(state["optimizer"]["state"])
            rows = self.optimizer.param_groups, before["settings"], now["settings"]
            for group, old, new in zip(*rows, strict=True):
                if self.scheduler is not None:  # whose state follows from them
                    check_same(old, new, "optimizer setting {!r}", self.file)
                group.update({k: v for k, v in new.items() if not same(old.get(k), v)})
            check_same(before["schedule"], now["schedule"], "scheduler setting {!r}", self.file)
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise InputError(f"{self.file}: is of another model or optimizer ({line})") from None
        self.log = state["log"]

    def _uncast(self, saved: dict[int, dict[str, Any]]) -> None:
        """Assign states that were cast to the type of their parameter, which changes bits."""
        rows = (p for group in self.optimizer.param_groups for p in group["params"])
        for k, parameter in enumerate(rows):
            now = self.optimizer.state.get(parameter, {})
            for key, value in saved.get(k, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != now[key].dtype:
                    now[key] = value.to(now[key].device)


def read_checkpoint(file: Path | str, name: str) -> dict[str, Any]:
    """A job's ``passes``, ``log``, ``model`` and ``optimizer``; `InputError`: no such file."""
    state: Any = load(Path(file))
    if not isinstance(state, dict) or (found := state.get("format")) != FORMAT:
        of = f"of format {found}" if isinstance(state, dict) and found else "no checkpoint"
        raise InputError(f"{file}: is {of}, expected format {FORMAT}; resume in another folder")
    keys = {"job", "passes", "log", "model", "optimizer", "scheduler", "made"}
    if not keys <= state.keys() or not isinstance(state["log"], list):
        raise InputError(f"{file}: is damaged")
    if state["job"] != name or len(state["log"]) != state["passes"]:
        raise InputError(f"{file}: is of job {state['job']!r}, expected {name!r}")
    return state


def _kind(made: Any) -> str:
    return "none" if made is None else f"{type(made).__module__}.{type(made).__qualname__}"


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
