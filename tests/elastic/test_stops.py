"""Passes that are stopped and continued: the bits of passes that were never stopped."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import training_cases as cases
from training_cases import Replay, job

import optsched
from optsched import InputError
from optsched.cluster import Decision
from optsched.elastic import run
from optsched.elastic.checkpoint import read_checkpoint, seed_all
from optsched.elastic.training import Member
from optsched.elastic.workers import Join, Order, StopFile

if TYPE_CHECKING:
    from pathlib import Path


class StopAt:
    """Stop file of one rank that stops before a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def may_start(self, rank: int, step: int) -> bool:
        """Whether the step may start."""
        stops = step == self.step
        self.step = -1 if stops else self.step
        return not stops


def noisy(dropout: float = 0.3) -> Any:
    """A network with statistics, whose data are random on every access."""
    return cases.net(dropout, norm=True)


def random_data() -> Any:
    """Samples with noise of all three random generators."""
    train, validation = cases.data(61)
    return cases.Noisy(train), validation


def member(one: Any, folder: Path, done: int = 0) -> Member:
    """The only worker of a job, in this process."""
    folder.mkdir(exist_ok=True)
    seed_all(0)
    return Member(one, Join(0, 1, "cpu", "", str(folder), done), one.data())


def test_every_step(tmp_path: Path) -> None:
    """A pass that is stopped before any of its steps has the bits of one that is not."""
    kinds: dict[str, Any] = {
        "noise": {"model": noisy, "data": random_data, "micro": {}},
        "language": cases.LANGUAGE,
    }
    for name, fields in kinds.items():
        one = job(name, **{"batch_size": 20, **fields}, sizes=(1,))
        size = len(one.data()[0])
        orders = [Order(k, [size], [one.batch_size], 0.5 + k) for k in (0, 1)]
        calm = member(one, tmp_path / name)
        for order in orders:
            calm.train(order)
        expected = torch.load(tmp_path / name / "checkpoint.pt")
        steps = -(-size // one.batch_size)
        for step in range(steps - 1):
            folder = tmp_path / f"{name}-{step}"
            member(one, folder).train(orders[0])
            for stop in (step, step + 1):
                again = member(one, folder, 1)
                assert again.train(orders[1], StopAt(stop)) == stop / steps
            again = member(one, folder, 1)
            assert again.joined()[2:] == (None, (tuple(orders[1]), stop / steps))
            again.train(orders[1])
            assert cases.same(torch.load(folder / "checkpoint.pt"), expected)


class Flicker:
    """Take all workers from a random job every few milliseconds."""

    name = "flicker"
    clairvoyant = False

    def __init__(self, sizes: dict[str, int], moments: int, every: float = 60.0) -> None:
        self.sizes, self.left, self.every = sizes, moments, every
        self.random = np.random.default_rng(0)

    def decide(self, view: Any) -> Decision:
        """Keep the sizes, but stop one job."""
        names = [view.workload.names[j] for j in view.job]
        quota = np.array([self.sizes[name] for name in names], np.int64)
        quota = np.where(view.running, view.gpus, quota)
        may = np.flatnonzero(view.running & view.preemptible & ~view.at_pass_end)
        if self.left and len(may) and self.random.random() < 0.5:
            quota[self.random.choice(may)] = 0
            self.left -= 1
        return Decision(quota, wake_at=view.time + 1 + int(self.random.exponential(self.every)))


def bits(folder: Path, *names: str) -> list[Any]:
    """Checkpoints of jobs."""
    return [read_checkpoint(folder / name / "checkpoint.pt", name) for name in names]


@pytest.mark.parametrize("moments", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_preempted_within_passes(moments: int, tmp_path: Path) -> None:
    """Jobs on one and three workers that are stopped at many moments: the same bits."""
    data = partial(cases.slow_data, 0.003 if moments > 4 else 0.0005)
    passes = 12 if moments > 4 else 3
    jobs = [
        job("wide", model=partial(cases.net, 0.3, True), data=data, sizes=(3,), passes=passes),
        job("one", data=data, sizes=(1,), passes=passes, micro={}),
    ]
    sizes = {"wide": 3, "one": 1}
    calm = run(jobs, 4, Replay({k: [v] for k, v in sizes.items()}), folder=tmp_path / "calm")
    found = run(jobs, 4, Flicker(sizes, moments), folder=tmp_path / "hit", preempt="anytime")
    assert not found.failed
    assert moments // 2 < found.metrics.preemptions <= moments
    assert optsched.verify(found.history) == []
    assert found.records == calm.records
    assert cases.same(bits(tmp_path / "calm", *sizes), bits(tmp_path / "hit", *sizes))


def notified(jobs: list[Any], quotas: Any, folder: Path, after: float, resume: bool) -> Any:
    """A run that gets SIGTERM so long after its workers are at work."""
    timers: list[threading.Timer] = []

    def begin(status: Any) -> None:
        if not timers and all(row.phase == "running" for row in status.jobs):
            timers.append(threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)))
            timers[0].start()

    try:
        return run(jobs, 2, Replay(quotas), folder=folder, resume=resume, on_progress=begin)
    finally:
        for timer in timers:
            timer.cancel()


def test_notice(tmp_path: Path) -> None:
    """SIGTERM stops passes after their steps; the run is resumed to the same bits."""
    jobs = [job("a", data=partial(cases.slow_data, 0.003), sizes=(2,), passes=3, micro={})]
    calm = run(jobs, 2, Replay({"a": [2]}), folder=tmp_path / "calm")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    parts = []
    for k, after in enumerate((0.1, 0.2, 0.25)):
        found = notified(jobs, {"a": [2]}, tmp_path / "hit", after, k > 0)
        assert not found.complete
        assert found.live[0].phase == "pending"
        parts.append(found.live[0].passes + found.live[0].part)
    assert parts == sorted(parts)
    assert any(part % 1 for part in parts)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found = run(jobs, 2, Replay({"a": [2]}), folder=tmp_path / "hit", resume=True)
    assert found.records == calm.records
    assert cases.same(bits(tmp_path / "calm", "a"), bits(tmp_path / "hit", "a"))
    assert optsched.verify(found.history) == []


def test_continued_on_other_workers(tmp_path: Path) -> None:
    """The remainder of a stopped pass has the same global batches, on any number of workers."""
    fields: dict[str, Any] = {"model": cases.net, "passes": 2, "sizes": (1, 2)}
    fields["data"] = partial(cases.slow_data, 0.003)
    kinds: dict[str, Any] = {"equal": {}, "uneven": {"micro": {"exposure": "resample"}}}
    for name, more in kinds.items():
        one = job(name, **fields, **more)
        calm = run([one], 2, Replay({name: [2]}), folder=tmp_path / "calm" / name)
        found = notified([one], {name: [2]}, tmp_path / name, 0.15, False)
        assert 0 < found.live[0].part < 1
        found = run([one], 2, Replay({name: [1]}), folder=tmp_path / name, resume=True)
        (before, *_), (after, last) = calm.records[name], found.records[name]
        assert after["samples"] == before["samples"]
        assert len(last["samples"]) == 1
        assert len({*after["entropy"]}) == 1
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-9)
        assert after["uncertainty"] == pytest.approx(before["uncertainty"], abs=0.01)
        assert after["metric"] == before["metric"]


def test_stop_file(tmp_path: Path) -> None:
    """All ranks end after the largest step that one of them has started."""
    file = StopFile(str(tmp_path / "stop"), 3)
    file.reset()
    assert all(file.may_start(rank, step) for rank, step in ((0, 0), (1, 0), (0, 1), (2, 0)))
    file.set_limit()
    assert file.may_start(1, 1) and file.may_start(2, 1)
    assert not any(file.may_start(rank, 2) for rank in range(3))
    file.reset()
    file.set_limit()  # before a rank has started
    assert not file.may_start(0, 0)


class Counts(torch.nn.Module):
    """A module that counts its forwards."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = cases.net(), kind
        self.calls: Any = torch.zeros(()) if kind == "tensor" else 0
        if kind == "buffer":
            del self.calls
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        """Count."""
        self.calls = self.calls + 1
        return self.inner(x)


class Keeps(Counts):
    """Its counter is in the state dict."""

    def get_extra_state(self) -> Any:
        """The counter."""
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        """Take the counter."""
        self.calls = state["calls"]


def test_counters_are_refused(tmp_path: Path) -> None:
    """A number that only an attribute holds would be reset by a resize: the module is named."""
    for kind in ("number", "tensor"):
        model = partial(torch.nn.Sequential, Counts(kind))
        with pytest.raises(InputError, match=r"model: training changes the attribute 0\.calls of"):
            member(job("a", sizes=(1,), model=model), tmp_path / kind).train(
                Order(0, [cases.SAMPLES], [20], 1.0)
            )
    for kind, made in (("buffer", Counts), ("number", Keeps)):
        one = job("b", sizes=(1,), model=partial(made, kind))
        member(one, tmp_path / made.__name__).train(Order(0, [cases.SAMPLES], [20], 1.0))
        again = member(one, tmp_path / made.__name__, 1)
        assert int(again.model.calls) > 10
