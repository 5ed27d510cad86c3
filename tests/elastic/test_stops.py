"""Passes that are stopped and continued: the bits of passes that were never stopped."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import training_cases as cases
from training_cases import Replay, job, member, states

import optsched
from optsched import InputError
from optsched.cluster import Decision
from optsched.elastic import run
from optsched.elastic.workers import Order

if TYPE_CHECKING:
    from pathlib import Path


def random_data() -> Any:
    """Samples with noise of all three random generators."""
    train, validation = cases.data(61)
    return cases.Noisy(train), validation


def test_every_step(tmp_path: Path) -> None:
    """A pass that is stopped before any of its steps has the bits of one that is not."""
    kinds: dict[str, Any] = {
        "noise": {"model": partial(cases.net, 0.3, True), "data": random_data, "micro": {}},
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
            for last in (step, step + 1):
                again = member(one, folder, 1)
                stop: Any = SimpleNamespace(may_start=lambda k, last=last: k != last)
                assert again.train(orders[1], stop) == last / steps
            again = member(one, folder, 1)
            assert again.joined()[2:] == (None, (tuple(orders[1]), last / steps))
            again.train(orders[1])
            assert cases.same(torch.load(folder / "checkpoint.pt"), expected)


class Flicker:
    """Take all workers from a random job at so many moments within passes."""

    name = "flicker"
    clairvoyant = False

    def __init__(self, moments: int) -> None:
        self.left, self.random = moments, np.random.default_rng(0)

    def decide(self, view: Any) -> Decision:
        """Keep the sizes, but stop one job."""
        sizes = np.array([SIZES[view.workload.names[j]] for j in view.job], np.int64)
        quota = np.where(view.running, view.gpus, sizes)
        may = np.flatnonzero(view.running & view.preemptible & ~view.at_pass_end)
        if self.left and len(may) and self.random.random() < 0.5:
            quota[self.random.choice(may)] = 0
            self.left -= 1
        return Decision(quota, wake_at=view.time + 1 + int(self.random.exponential(60)))


def jobs(seconds: float = 0.003, passes: int = 2) -> list[Any]:
    """Jobs on one to three workers, with data whose samples take some time."""
    fields: dict[str, Any] = {"data": partial(cases.slow_data, seconds), "passes": passes}
    slower = fields | {"data": partial(cases.slow_data, 2 * seconds), "model": cases.net}
    return [
        job("wide", model=partial(cases.net, 0.3, True), sizes=(3,), **fields),
        job("one", sizes=(1,), micro={}, **fields),
        job("equal", **slower),
        job("uneven", micro={"exposure": "resample"}, **slower),
    ]


SIZES = {"wide": 3, "one": 1, "equal": 2, "uneven": 2}


def quotas(**changes: int) -> Replay:
    """The sizes, with changes."""
    return Replay({name: [size] for name, size in (SIZES | changes).items()})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without stops, and its folder."""
    folder = tmp_path_factory.mktemp("calm")
    return run(jobs(), 5, quotas(), folder=folder), folder


@pytest.mark.parametrize("moments", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_preempted_within_passes(moments: int, calm: Any, tmp_path: Path) -> None:
    """Jobs on one and three workers that are stopped at many moments: the same bits."""
    (expected, folder), two = calm, jobs()[:2]
    if moments > 4:
        two, folder = jobs(0.0005, 12)[:2], tmp_path / "calm"
        expected = run(two, 4, quotas(), folder=folder)
    found = run(two, 4, Flicker(moments), folder=tmp_path / "hit", preempt="anytime")
    assert not found.failed
    assert moments // 4 < found.metrics.preemptions <= moments
    assert optsched.verify(found.history) == []
    for name in ("wide", "one"):
        assert found.records[name] == expected.records[name]
        assert cases.same(states(folder, name), states(tmp_path / "hit", name))


def test_notice(calm: Any, tmp_path: Path) -> None:
    """SIGTERM stops passes after their steps, and a run that is resumed continues them.

    On as many workers the bits are the same; on others the remainder of the pass has the same
    global batches.
    """
    expected, folder = calm
    timers: list[threading.Timer] = []

    def begin(status: Any) -> None:
        if not timers and all(row.phase == "running" for row in status.jobs[1:]):
            timers.append(threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGTERM)))
            timers[0].start()

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    three = jobs()[1:]
    try:
        found = run(three, 5, quotas(), folder=tmp_path, on_progress=begin)
    finally:
        for timer in timers:
            timer.cancel()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert not found.complete
    assert all(row.phase == "pending" for row in found.live)
    assert all(row.passes == 0 < row.part < 1 for row in found.live[1:])
    found = run(three, 5, quotas(equal=1, uneven=1), folder=tmp_path, resume=True)
    assert optsched.verify(found.history) == []
    assert found.records["one"] == expected.records["one"]
    assert cases.same(states(folder, "one"), states(tmp_path, "one"))
    for name in ("equal", "uneven"):
        (before, _), (after, last) = expected.records[name], found.records[name]
        assert after["samples"] == before["samples"]
        assert len(last["samples"]) == 1
        assert len({*after["entropy"]}) == 1
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-9)
        assert after["uncertainty"] == pytest.approx(before["uncertainty"], abs=0.01)
        assert after["metric"] == before["metric"]


class Counts(torch.nn.Module):
    """A module that counts its forwards in an attribute, or in a buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.inner = cases.net()
        if buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        else:
            self.calls: Any = 0

    def forward(self, x: Any) -> Any:
        """Count."""
        self.calls = self.calls + 1
        return self.inner(x)


def test_counters_are_refused(tmp_path: Path) -> None:
    """A number that only an attribute holds would be reset by a resize: the module is named."""
    order = Order(0, [cases.SAMPLES], [20], 1.0)
    one = job("a", sizes=(1,), model=partial(torch.nn.Sequential, Counts(False)))
    with pytest.raises(InputError, match=r"model: training changes the attribute 0\.calls of"):
        member(one, tmp_path / "refused").train(order)
    one = job("b", sizes=(1,), model=partial(Counts, True))
    member(one, tmp_path / "kept").train(order)
    assert int(member(one, tmp_path / "kept", 1).model.calls) > 10
