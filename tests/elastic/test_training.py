"""Real training on worker processes: exact at every history of quotas, also if workers die."""

from __future__ import annotations

import multiprocessing
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import training_cases as cases
from training_cases import Replay, job, states

import optsched
from optsched import InputError
from optsched.elastic import run

if TYPE_CHECKING:
    from pathlib import Path

QUOTAS = {"a": [2, 2], "b": [1, 2, 1], "warm": [1, 2, 3], "loss": [2, 1, 2], "one": [1, 1]}
SCHEDULES = {"warm": cases.warm_up, "loss": cases.plateau, "one": cases.cosine}


def five(place: Path, seconds: float = 0.0) -> list[Any]:
    """Jobs of several models; a worker of the first dies in pass 2, unless `place` exists."""
    fields: dict[str, dict[str, Any]] = {
        "a": {"model": partial(cases.dies_once, str(place), 17), "micro": {"exposure": "resample"}},
        "b": {"model": partial(cases.net, 0.2, True)},
    } | {name: {"model": cases.net, "scheduler": make} for name, make in SCHEDULES.items()}
    data = partial(cases.slow_data, seconds)
    return [
        job(name, data=data, passes=len(quotas), sizes=(1, 2, 3), **fields[name])
        for name, quotas in QUOTAS.items()
    ]


def stop_after(passes: int) -> Any:
    """Interrupt a run, once, when its jobs have done so many passes together."""
    stopped: list[bool] = []

    def check(status: Any) -> None:
        if not stopped and sum(row.passes for row in status.jobs) >= passes:
            stopped.append(True)
            raise KeyboardInterrupt

    return check


def test_every_history_is_exact(tmp_path: Path) -> None:
    """On one worker the bits of a plain loop, with other quotas its numbers to 1e-12.

    A worker that dies and a run that ends in between change no bit.
    """
    (tmp_path / "exists").touch()
    jobs = five(tmp_path / "exists")
    calm = run(jobs, 3, Replay(QUOTAS), folder=tmp_path / "calm")
    assert calm.complete and not calm.failed
    assert calm.quotas == QUOTAS
    assert optsched.verify(calm.history) == []
    assert calm.metrics.unfinished == 0
    assert calm.metrics.jct_mean <= calm.metrics.makespan
    for one in jobs[2:]:
        (state,) = states(tmp_path / "calm", one.name)
        model, optimizer, losses = cases.alone(one, QUOTAS[one.name])
        for key, value in model.state_dict().items():
            near = 0 if one.name == "one" else 1e-12
            assert torch.allclose(state["model"][key], value, rtol=0, atol=near), key
        rate = state["optimizer"]["param_groups"][0]["lr"]
        assert type(rate) is float
        assert 0.01 != rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert [record["loss"] for record in state["log"]] == pytest.approx(losses)
    for name, log in calm.records.items():
        for record in log:
            assert name == "a" or sum(record["samples"]) == cases.SAMPLES
            assert len(record["entropy"]) == len(record["margin"]) == len(record["samples"])
            assert all(0 < h < 1 for h in record["entropy"] + record["margin"])
    learned = [np.mean(record["entropy"]) for record in calm.records["b"]]
    assert learned[-1] < learned[0]

    jobs, folder = five(tmp_path / "mark"), tmp_path / "hit"
    half = run(jobs, 3, Replay(QUOTAS), folder=folder, on_progress=stop_after(6))
    assert not half.complete
    assert 6 <= sum(map(len, half.records.values())) < 13
    assert optsched.verify(half.history) == []
    for given, options, words in (
        (jobs, {}, "has a run in it"),
        (jobs[:1], {"resume": True}, "expected"),
    ):
        with pytest.raises(InputError, match=words):
            run(given, 3, folder=folder, **options)
    found = run(jobs, 3, Replay(QUOTAS), folder=folder, resume=True)
    assert (tmp_path / "mark").exists(), "no worker died"
    assert found.complete and not found.failed
    assert found.metrics.makespan >= half.metrics.makespan
    assert optsched.verify(found.history) == []
    assert found.records == calm.records
    assert cases.same(*(states(tmp_path / part, *QUOTAS) for part in ("calm", "hit")))
    with pytest.raises(InputError, match=r"slots: the run in .* had more"):
        run([cases.job(name) for name in QUOTAS], 2, folder=folder, resume=True)


@pytest.mark.slow
def test_kills(tmp_path: Path) -> None:
    """Workers killed at random times: the end result has the bits of an undisturbed run."""
    (tmp_path / "exists").touch()
    jobs = five(tmp_path / "exists", 0.003)
    calm = run(jobs, 3, Replay(QUOTAS), folder=tmp_path / "calm")
    random, killed = np.random.default_rng(0), []

    def kill(status: Any) -> None:
        workers = multiprocessing.active_children()
        if workers and len(killed) < 6 and random.random() < 0.4:
            killed.append(workers[random.integers(len(workers))])
            threading.Timer(float(random.uniform(0, 0.4)), killed[-1].kill).start()

    found = run(jobs, 3, Replay(QUOTAS), folder=tmp_path / "shot", on_progress=kill)
    assert len(found.log.job) > len(calm.log.job), "no worker was hit"
    assert optsched.verify(found.history) == []
    assert found.records == calm.records
    assert cases.same(*(states(tmp_path / part, *QUOTAS) for part in ("calm", "shot")))


def test_ends_and_failures(tmp_path: Path) -> None:
    """Jobs end at a target, at samples or after their passes; a failed one is tried again.

    Data are equal on all ranks, also if they are drawn without a seed. Meanwhile no second run
    may use the folder.
    """
    drawn: dict[str, Any] = {"data": cases.drawn, "sizes": (2,), "passes": 2}
    wrong: dict[str, dict[str, Any]] = {
        "raises": {"model": cases.raises},
        "still": {"micro": {}, "optimizer": cases.still},
        "mean": {"metric": cases.mean},
        "nested": {"scheduler": cases.nested},
        "bare": {"scheduler": cases.bare},
        "late": {"optimizer": partial(cases.made, cases.Late, {"lr": 0.1})},
    }
    fields: dict[str, dict[str, Any]] = {
        "target": {"target": 0.5, "passes": 50},
        "samples": {"samples": cases.SAMPLES + 1},
        "passes": {"passes": 3, "submit": 0.3},
        "never": {"target": 1.0, "passes": 2, "model": partial(cases.net, 0.9)},
        "pixels": {"model": cases.pixels, "data": cases.images, "passes": 1},
        "drawn": drawn, "between": {"sizes": (2,), "passes": 1, "submit": 0.3},
        "again": drawn | {"submit": 0.6},
    }  # fmt: skip
    phases, refused = [], []

    def progress(status: Any) -> None:
        phases.append(status.jobs[0].phase)
        if status.time > 0 and not refused:
            with pytest.raises(InputError, match="a run goes on in it"):
                run([job("a")], 1, folder=tmp_path, resume=True)
            refused.append(True)

    jobs = [job(name, **given) for name, given in (fields | wrong).items()]
    found = run(jobs, 2, "elastic", folder=tmp_path, on_progress=progress)
    assert refused
    log = found.records
    assert log["target"][-1]["metric"] >= 0.5
    assert all(record["metric"] < 0.5 for record in log["target"][:-1])
    assert [len(log[name]) for name in ("samples", "passes", "never")] == [2, 3, 2]
    assert 0 <= log["pixels"][0]["metric"] <= 1
    assert log["drawn"] == log["again"]
    assert found.failed.keys() == wrong.keys()
    says = {
        "raises": "ValueError: no such layer", "still": "rate",
        "mean": "expected a number for each of", "nested": "a StepLR cannot be kept",
        "bare": "a object, has no state_dict", "late": "odd: a deque cannot be kept",
    }  # fmt: skip
    assert all(sentence in found.failed[name] for name, sentence in says.items())
    assert not any(log[name] for name in ("raises", "mean", "nested", "bare", "late"))
    order = [*fields, *wrong]
    at = [order.index(one.spec.name) for one in found.live]
    assert (found.jct >= 0).tolist() == [i < len(fields) for i in at]
    seen = [phase for phase in dict.fromkeys(phases) if phase != "pending"]
    assert seen == ["unborn", "joining", "running", "ended"]

    fields["still"] = {"micro": {}}
    jobs = [job(name, **fields.get(name, {})) for name in order]
    right = run(jobs, 2, folder=tmp_path, resume=True)
    assert not right.failed
    assert all(len(right.records[name]) == 4 for name in wrong)
    (tmp_path / "run.json").write_text('{"jobs": {"a": 1}}')
    with pytest.raises(InputError, match="is no state of a run"):
        run([job("a")], 2, folder=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 1, "jobs": [job("a", sizes=(2,))]}, "needs 2 workers, there are 1"),
        ({"jobs": ["a"]}, r"jobs\[0\]"),
        ({"jobs": [job("a", model=lambda: 1)]}, 'job "a": a function cannot go to another process'),
        ({"devices": ["cpu"]}, "devices: expected 2"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], words: str) -> None:
    """An error before any process is started."""
    given = {"jobs": [job("a")], "slots": 2} | change
    with pytest.raises(InputError, match=words):
        run(given.pop("jobs"), given.pop("slots"), **given)
