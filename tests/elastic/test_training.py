"""Real training on worker processes: exact at every quota history, whatever dies."""

from __future__ import annotations

import multiprocessing
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
from optsched.elastic import LiveRun, StepPlan, VariableBatchLoader, read_checkpoint, run
from optsched.elastic.checkpoint import seed_all

if TYPE_CHECKING:
    from pathlib import Path


def states(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Checkpoints of some jobs."""
    return [read_checkpoint(folder / name / "checkpoint.pt", name) for name in names]


def alone(one: Any, quotas: list[int]) -> dict[str, Any]:
    """The oracle: a job trained in this process, its ranks' batches put together."""
    seed_all(one.seed, 0, 0)
    model, (train, _) = one.model(), one.data()
    optimizer = one.optimizer(model.parameters())
    for number, workers in enumerate(quotas):
        shares = [
            [total // workers + (r < total % workers) for r in range(workers)]
            for total in (len(train), one.batch_size)
        ]
        plan = StepPlan(tuple(shares[0]), tuple(shares[1]))
        loaders = [
            VariableBatchLoader(train, plan, r, epoch=number, seed=one.seed) for r in range(workers)
        ]
        model.train()
        for batches in zip(*loaders, strict=True):
            x, y = (torch.cat([batch[k] for batch, _ in batches]) for k in (0, 1))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict())


def test_equals_training_alone(tmp_path: Path) -> None:
    """A job whose workers change from pass to pass ends where one process ends, to 1e-12."""
    quotas = {"a": [1, 2, 2, 3, 1], "b": [2, 1, 3]}
    jobs = [
        job(name, model=cases.net, sizes=(1, 2, 3), passes=len(q)) for name, q in quotas.items()
    ]
    found = run(jobs, 3, Replay(quotas), folder=tmp_path)
    assert found.quotas == quotas
    assert found.complete and not found.failed
    assert optsched.verify(found.history) == []
    for one, state in zip(jobs, states(tmp_path, "a", "b"), strict=True):
        for key, value in alone(one, quotas[one.name]).items():
            assert torch.allclose(state["model"][key], value, rtol=0, atol=1e-12), key
    assert [len(record["samples"]) for record in state["log"]] == quotas["b"]
    assert all(sum(record["samples"]) == cases.SAMPLES for record in state["log"])
    metrics = found.metrics
    assert metrics.unfinished == 0
    assert metrics.jct_mean <= metrics.makespan


@pytest.mark.parametrize("slow", [pytest.param(0.0, marks=pytest.mark.slow), 0.001])
def test_kills(slow: float, tmp_path: Path) -> None:
    """Workers killed at random times: the end result has the bits of an undisturbed run."""
    quotas = {"a": [2, 2, 1, 2, 2, 2], "b": [1, 1, 2, 1, 1, 1]}
    options: dict[str, Any] = {"passes": 6, "data": partial(cases.slow_data, slow)}
    if slow == 0.0:
        options["data"] = partial(cases.data, 1_500)
    jobs = [
        job("a", micro={"exposure": "resample"}, **options),
        job("b", model=partial(cases.net, 0.2, True), **options),
    ]
    calm = run(jobs, 2, Replay(quotas), folder=tmp_path / "calm")
    over, killed, random = threading.Event(), 0, np.random.default_rng(0)

    def shoot() -> None:
        nonlocal killed
        while not over.wait(float(random.uniform(0.2, 0.8))) and killed < 6:
            workers = multiprocessing.active_children()
            if workers:
                os.kill(workers[random.integers(len(workers))].pid or 0, signal.SIGKILL)
                killed += 1

    started = []

    def begin(status: Any) -> None:
        if not started and any(row.phase == "running" for row in status.jobs):
            started.append(threading.Thread(target=shoot))
            started[0].start()

    try:
        disturbed = run(jobs, 2, Replay(quotas), folder=tmp_path / "shot", on_progress=begin)
    finally:
        over.set()
        started[0].join()
    assert killed >= 1
    assert len(disturbed.log.job) > len(calm.log.job), "nothing was hit"
    assert disturbed.quotas == calm.quotas == quotas
    assert not disturbed.failed
    assert optsched.verify(disturbed.history) == []
    for a, b in zip(
        states(tmp_path / "calm", "a", "b"), states(tmp_path / "shot", "a", "b"), strict=True
    ):
        assert cases.same(a, b)


def test_dies_within_its_second_pass(tmp_path: Path) -> None:
    """A rank that dies in the middle of a pass costs this pass of this job alone."""
    names = ("mark", "none")
    (tmp_path / "none").touch()
    found: list[LiveRun] = []
    for name in names:
        model = partial(cases.dies_once, str(tmp_path / name), 17)
        jobs = [job("a", model=model, sizes=(2,), passes=3), job("b", sizes=(1,), passes=3)]
        found.append(run(jobs, 3, "elastic", folder=tmp_path / f"run-{name}"))
    hit, calm = found
    assert len(hit.log.job) == len(calm.log.job) + 1
    assert hit.records == calm.records
    assert cases.same(*(states(tmp_path / f"run-{name}", "a")[0] for name in names))


def test_resume(tmp_path: Path) -> None:
    """A run that ended in the middle goes on in its folder, to the same bits."""
    quotas = {"a": [1, 2, 1, 2], "b": [1, 1, 2]}
    jobs = [job("a"), job("b", passes=3, micro={})]
    run(jobs, 2, Replay(quotas), folder=tmp_path / "whole")

    def stop(status: Any) -> None:
        if sum(row.passes for row in status.jobs) >= 3:
            raise KeyboardInterrupt

    half = run(jobs, 2, Replay(quotas), folder=tmp_path / "half", on_progress=Once(stop))
    assert not half.complete
    assert 3 <= sum(map(len, half.records.values())) < 7
    assert optsched.verify(half.history) == []
    with pytest.raises(InputError, match="has a run in it"):
        run(jobs, 2, folder=tmp_path / "half")
    with pytest.raises(InputError, match="expected"):
        run(jobs[:1], 2, folder=tmp_path / "half", resume=True)
    rest = run(jobs, 2, Replay(quotas), folder=tmp_path / "half", resume=True)
    assert rest.complete
    assert rest.quotas == quotas
    assert rest.metrics.makespan >= half.metrics.makespan
    assert optsched.verify(rest.history) == []
    for name in quotas:
        assert cases.same(*(states(tmp_path / part, name)[0] for part in ("whole", "half")))
    again = run(jobs, 2, Replay(quotas), folder=tmp_path / "half", resume=True)
    assert again.jct.tolist() == rest.jct.tolist()
    with pytest.raises(InputError, match=r"slots: the run in .* had more"):
        run(jobs, 1, Replay(quotas), folder=tmp_path / "half", resume=True)
    more = [jobs[0], job("b", passes=5, micro={})]
    assert run(more, 2, Replay(quotas), folder=tmp_path / "half", resume=True).quotas["b"][3:] == [
        2,
        2,
    ]


def test_a_failed_job_is_tried_again_by_resuming(tmp_path: Path) -> None:
    """With what was wrong put right; meanwhile nobody else may use the folder."""

    def second(status: Any) -> None:
        if status.time > 0 and not refused:
            with pytest.raises(InputError, match="a run goes on in it"):
                run([job("a")], 1, folder=tmp_path, resume=True)
            refused.append(True)

    refused: list[bool] = []
    wrong = [job("a", model=cases.raises), job("micro", micro={}, optimizer=cases.still)]
    found = run(wrong, 2, folder=tmp_path, on_progress=second)
    assert refused
    assert set(found.failed) == {"a", "micro"}
    assert "rate" in found.failed["micro"]
    right = run([job("a"), job("micro", micro={})], 2, folder=tmp_path, resume=True)
    assert not right.failed
    assert [*map(len, right.records.values())] == [4, 4]
    (tmp_path / "run.json").write_text('{"jobs": {"a": 1}}')
    with pytest.raises(InputError, match="is no state of a run"):
        run([job("a")], 2, folder=tmp_path, resume=True)


def test_data_are_equal_on_all_ranks() -> None:
    """Also if they are drawn without a seed, whatever a worker did before."""
    jobs = [job("before", sizes=(1,), passes=1), job("a", data=cases.drawn, sizes=(2,), passes=2)]
    beside, alone = run(jobs, 2, "fifo"), run(jobs[1:], 2, "fifo")
    assert beside.records["a"] == alone.records["a"]


def test_metrics_of_many_dimensions() -> None:
    """A sample's metric is the mean over its own axes; a mean over the batch is refused."""
    jobs = [
        job("pixels", model=cases.pixels, data=cases.images, passes=1),
        job("mean", metric=cases.mean, passes=1),
    ]
    found = run(jobs, 2, "fifo")
    assert 0 <= found.records["pixels"][0]["metric"] <= 1
    assert "expected a number for each of" in found.failed["mean"]


class Once:
    """Calls a function until it has raised."""

    def __init__(self, call: Any) -> None:
        self.call: Any = call

    def __call__(self, *given: Any) -> None:
        """Call it."""
        call, self.call = self.call, lambda *_: None
        call(*given)
        self.call = call


def test_ends(tmp_path: Path) -> None:
    """Jobs end at a target on validation data, at samples or after their passes; some fail."""
    jobs = [
        job("target", target=0.5, passes=50),
        job("samples", samples=cases.SAMPLES + 1),
        job("passes", passes=3, submit=0.3),
        job("never", target=1.0, passes=2, model=partial(cases.net, 0.9)),
        job("raises", model=cases.raises),
    ]
    phases = []
    found = run(jobs, 2, "elastic", on_progress=lambda s: phases.append(s.jobs[0].phase))
    passes = {name: len(log) for name, log in found.records.items()}
    assert found.records["target"][-1]["metric"] >= 0.5
    assert all(record["metric"] < 0.5 for record in found.records["target"][:-1])
    assert (passes["samples"], passes["passes"], passes["never"]) == (2, 3, 2)
    assert found.failed == {"raises": "ValueError: no such layer"}
    assert (found.jct >= 0).tolist() == [True, True, True, False, True]
    seen = [phase for phase in dict.fromkeys(phases) if phase != "pending"]
    assert seen == ["unborn", "joining", "running", "ended"]


def test_uncertainty_is_that_of_the_logits(tmp_path: Path) -> None:
    """(2), (3), (13)-(17), (26): what is recorded is measured, and falls while a job learns."""
    found = run([job("a", passes=6, model=cases.net)], 2, "elastic")
    log = found.records["a"]
    for record in log:
        assert len(record["entropy"]) == len(record["margin"]) == len(record["samples"]) == 2
        assert all(0 < h < 1 for h in record["entropy"] + record["margin"])
    assert np.mean(log[-1]["entropy"]) < np.mean(log[0]["entropy"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 1, "jobs": [job("a", sizes=(2,))]}, "needs 2 workers, there are 1"),
        ({"jobs": []}, "jobs: empty"),
        ({"jobs": ["a"]}, r"jobs\[0\]"),
        ({"jobs": [job("a"), job("a")]}, "is there twice"),
        ({"jobs": [job("a", model=lambda: 1)]}, 'job "a": a function cannot go to another process'),
        ({"policy": "best"}, "policy"),
        ({"devices": ["cpu"]}, "devices: expected 2"),
        ({"devices": ["cpu", "tpu"]}, "devices: expected cpu"),
        ({"resume": True}, "resume: name the folder"),
        ({"preempt": "never"}, "preempt"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], words: str) -> None:
    """What is wrong is said before any process is started."""
    given = {"jobs": [job("a")], "slots": 2} | change
    with pytest.raises(InputError, match=words):
        run(given.pop("jobs"), given.pop("slots"), **given)
