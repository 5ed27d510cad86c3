"""Job arrays in plans: sizes against brute force, documents, plans after a change, commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program import Cli

from optsched import JobArray, verify
from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.errors import InputError
from optsched.model.document import read, write
from optsched.plan import (
    ArrayRequest,
    ClusterSnapshot,
    PlanJob,
    explain_arrays,
    order_arrays,
    plan,
    planned_arrays,
    schedule_of,
)
from optsched.plan.snapshot import from_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "clusters" / "plan-arrays.md"


def array(seed: int, jobs: int = 2, stages: int = 3, **fields: Any) -> JobArray:
    """A random array."""
    draw = np.random.default_rng(seed)
    forward = draw.integers(1, 20, (jobs, stages))
    return JobArray(
        forward, 2 * forward, lag_forward=draw.integers(0, 5, (jobs, stages - 1)), **fields
    )


def snapshot(
    requests: Sequence[PlanJob], sizes: Sequence[int] = (4, 4), **fields: Any
) -> ClusterSnapshot:
    """Free hosts of one type."""
    types = tuple(HostType(f"x{n}", n, nic_rate=10.0) for n in sorted({*sizes}))
    cluster = Cluster(tuple(Host(f"n{h}", f"x{n}") for h, n in enumerate(sizes)), types)
    state = fields.pop("state", None) or ClusterState.idle(cluster)
    return ClusterSnapshot(state, requests, **fields)


def request(name: str, problem: JobArray, gpus: int = 4, **fields: Any) -> PlanJob:
    """A waiting array."""
    of_array = {key: fields.pop(key) for key in ("least", "steps", "weight") if key in fields}
    return PlanJob(name=name, gpus=gpus, array=ArrayRequest(problem=problem, **of_array), **fields)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sizes_are_those_of_brute_force(data: st.DataObject) -> None:
    """The sum of weight x busy GPUs is the largest within GPUs and quotas of groups."""
    draw = data.draw
    jobs = [
        request(
            f"a{k}", array(draw(st.integers(0, 99)), 2, draw(st.integers(1, 4))),
            draw(st.integers(1, 4)),
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])), group=draw(st.sampled_from(["", "g"])),
        )
        for k in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    total, quota = draw(st.integers(1, 8)), draw(st.integers(0, 5))
    made = plan(snapshot(jobs, [total], quotas={"g": quota}), samples=1)
    chosen = {name: len(gpus) for name, gpus in made.starts.items()}

    def worth(sizes: dict[str, int]) -> float:
        return sum(
            job.array.weight * job.array.busy(sizes[job.name])
            for job in jobs
            if job.array and sizes.get(job.name)
        )

    options = [[0, *(n for n in job.array.periods if n <= job.gpus)] for job in jobs if job.array]
    best = 0.0
    for row in product(*options):
        sizes = {job.name: n for job, n in zip(jobs, row, strict=True)}
        of_group = sum(sizes[job.name] for job in jobs if job.group == "g")
        if sum(row) <= total and of_group <= quota:
            best = max(best, worth(sizes))
    free = not any(job.group == "g" for job in jobs)
    assert worth(chosen) <= best + 1e-6
    assert worth(chosen) >= (best if free or quota >= total else 0.0) - 1e-3
    assert made.busy_bound >= best - 1e-3


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_document_holds_the_schedule_of_every_array(data: st.DataObject) -> None:
    """It verifies, survives its file, and gives back schedules of the arrays on their GPUs."""
    draw, jobs = data.draw, []
    for k in range(draw(st.integers(1, 4))):
        unit = draw(st.sampled_from(["ns", "us"]))
        memory = draw(st.sampled_from([None, [10] * 3]))
        problem = array(
            draw(st.integers(0, 99)), draw(st.integers(1, 3)), 3, time_unit=unit, memory=memory,
            activation=1, multiplicity=draw(st.integers(1, 2)),
        )  # fmt: skip
        jobs.append(request(f"a{k}", problem, least=draw(st.integers(1, 2))))
    jobs.append(PlanJob(name="other", gpus=2))
    cluster = snapshot([]).cluster
    state = ClusterState.idle(cluster).take("n0:1", "runs").fail("n1:0")
    tree = json.loads(snapshot(jobs, state=state).to_json())
    made = plan(from_tree(tree, "snapshot"), samples=1)
    document = order_arrays(made, time_limit=0.1)
    assert read(write(document).decode()) == document
    assert verify(document) == []
    names = [document.job_names[j] for j in document.job[document.users[1]]]
    assert names == ["runs"]
    for one in planned_arrays(document):
        schedule = schedule_of(document, one.name)
        asked = next(job.array for job in jobs if job.name == one.name)
        assert asked is not None
        problem = asked.on(len(one.gpus)).replace(
            devices=[document.resources[gpu].name for gpu in one.gpus]
        )
        assert verify(schedule, problem) == []
        assert schedule.period == one.period >= one.bound
        assert made.starts[one.name] == tuple(one.gpus)
    n = len(planned_arrays(document))
    assert len(explain_arrays(document)) == n + bool(n)


def test_a_new_plan_moves_only_what_must_move() -> None:
    """Arrays on GPUs that are still there keep them and their order; others are planned anew."""
    jobs = [request(f"a{k}", array(k, 3, 2), 2, least=1) for k in range(4)]
    before = order_arrays(plan(snapshot(jobs)), time_limit=0.2)
    places = {one.name: one.gpus for one in planned_arrays(before)}
    lost = places["a2"][0]
    state = ClusterState.idle(snapshot([]).cluster).fail([lost])
    given = snapshot([*jobs[:3], request("new", array(9, 2, 2), 2)], state=state)
    made = plan(given, previous=before)
    after = order_arrays(made, time_limit=0.2, previous=before)
    assert verify(after) == []
    for name in ("a0", "a1"):
        assert [*made.starts[name]] == places[name]
        assert schedule_of(after, name) == schedule_of(before, name)
    assert lost not in made.starts["a2"]
    said = "\n".join(explain_arrays(after, before))
    assert "a0 keeps" in said
    assert "a2 moves from" in said
    assert "new starts on" in said
    assert "a3 leaves" in said
    crowded = plan(snapshot([PlanJob(name="rigid", gpus=2), *jobs]), previous=before)
    assert {name: [*gpus] for name, gpus in crowded.starts.items()} == places


def test_levels_types_and_reasons() -> None:
    """Arrays stay within their level, and those without GPUs have a reason and a start."""
    wide = request("wide", array(3, 4, 8), 8, level="host", priority=1)
    large = request("large", array(4, 2, 8), 8, least=6, time_left=9, priority=2)
    made = plan(snapshot([wide, large, request("never", array(5, 2, 8), 8, least=8, level="host")]))
    verdicts = {one.job.name: one for one in made.verdicts}
    assert len({gpu // 4 for gpu in made.starts["wide"]}) == 1
    assert verdicts["large"].why in ("space", "order")
    assert verdicts["large"].expected is not None
    assert verdicts["never"].why == "never"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"problem": "/etc/passwd"}, "problem: expected the document optsched.jobarray/1"),
        ({"problem": {"format": "optsched.jobarray/2"}}, "newer"),
        ({"problem": 3}, "problem: expected"), ({"problem": None}, "problem: expected"),
        ({"least": 4}, "least: 4 GPUs, but it has only 3 stages"),
        ({"least": 3, "gpus": 2}, "gpus: 2, but its array needs 3"),
        ({"gpus": 4, "pod": 2}, "pod: expected 1 for an array"),
        ({"weight": 0}, "weight"), ({"weight": float("nan")}, "weight"), ({"steps": True}, "steps"),
        ({"steps": 10**30}, "steps"), ({"least": 0}, "least"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(fields: dict[str, Any], text: str) -> None:
    """With the field."""
    of_job = {key: fields[key] for key in ("gpus", "pod") if key in fields}
    of_array = {"problem": array(1)} | {key: v for key, v in fields.items() if key not in of_job}
    with pytest.raises(InputError, match=re.escape(text)):
        snapshot([PlanJob(**{"name": "a", "gpus": 3} | of_job, array=ArrayRequest(**of_array))])


def test_documents_that_do_not_fit_are_refused() -> None:
    """Unknown names, and arrays that are not where the document says."""
    document = order_arrays(plan(snapshot([request("a", array(1))])), time_limit=0.1)
    with pytest.raises(InputError, match="no array 'b' in this plan; there are a"):
        schedule_of(document, "b")
    with pytest.raises(InputError, match="time_limit: expected seconds >= 0, got nan"):
        order_arrays(plan(snapshot([request("a", array(1))])), time_limit=float("nan"))
    good = document.provenance["arrays"][0]
    for key, value in (("gpus", [9]), ("gpus", []), ("cycles", 0), ("first_job", 5), ("x", 1)):
        arrays = [good | {key: value}]
        bad = replace(document, provenance={**document.provenance, "arrays": arrays})
        with pytest.raises(InputError):
            schedule_of(bad, "a")


def write_page(folder: Path) -> list[str]:
    """Write the files of the page; return its commands."""
    text = PAGE.read_text()
    (folder / "train.py").write_text(re.findall(r"```python\n(# train.py\n.*?)```", text, re.S)[0])
    (folder / "arrays.json").write_text(re.findall(r"```json\n(.*?)```", text, re.S)[0])
    return re.findall(r"^\$ optsched (.*)$", text, re.M)


def test_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, but each array is trained in this process, for two steps."""
    pytest.importorskip("torch")
    from optsched.arraypipe import from_plan

    monkeypatch.chdir(tmp_path)
    run, commands, trained = Cli(tmp_path, monkeypatch, capsys), write_page(tmp_path), []
    changed = json.loads((tmp_path / "arrays.json").read_text())
    for job in changed["jobs"]:
        job["array"]["steps"] = 2
    (tmp_path / "arrays.json").write_text(json.dumps(changed))

    class Process:
        returncode = 0

        def __init__(self, words: list[str], env: dict[str, str], **_: Any) -> None:
            trained.append(env["CUDA_VISIBLE_DEVICES"])
            end = words.index("--ranks") if "--ranks" in words else len(words)
            done = run(*words[len(from_plan.PROGRAM) : end])
            assert done.code == 0, done.err

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("optsched.arraypipe.from_plan.Popen", Process)
    for command in commands:
        done = run(*command.replace("--train out", "--train out --time 1").split())
        assert done.code == 0, (command, done.err)
    assert sorted(",".join(trained).split(",")) == [*"0123"]
    assert (tmp_path / "out" / "plan.html").exists()
    again = run("plan", "arrays.json", "--previous", "out/plan.schedule.json")
    assert again.out.count(" keeps here") == 2
    assert "choose one by --array" in run.refused(
        "arraypipe", "run", "train.py:make_small", "out/plan.schedule.json"
    )
    (tmp_path / "arrays.json").write_text(json.dumps(changed).replace("small.profile", "no"))
    assert "no.json: no such file" in run.refused("plan", "arrays.json")


@pytest.mark.slow
def test_the_page_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training in processes of their own, then with a GPU less, from the checkpoints."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run, commands = Cli(tmp_path, monkeypatch, capsys), write_page(tmp_path)
    for command in commands:
        done = run(*command.split())
        assert done.code == 0, (command, done.err)
    text = (tmp_path / "arrays.json").read_text().replace('"rest"', '"rest", "down": "here:3"')
    (tmp_path / "arrays.json").write_text(text.replace('"steps": 100', '"steps": 120'))
    done = run("plan", "arrays.json", "--previous", "out/plan.schedule.json", "--train", "out")
    assert done.code == 0, done.err
    assert done.out.count("done, loss") == 7
