"""The profile document: strict reading, prediction of other sizes, the way to a problem."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, JobArray
from optsched.arraypipe.profile.document import Profile, ProfiledJob, from_tree, to_bytes

ADAM, SGD = "AdamW(weight_decay)", "SGD(momentum)"
SIZES, KINDS = (4, 8, 16), ("forward", "backward", "recompute")


def tree() -> dict[str, Any]:
    """Three stages and three jobs; F takes 100 us + 10 us a sample and so on, medians exact."""
    blocks = [
        {
            "stage": s, "batch": b, "dtype": "fp32", "saved_bytes": 500 * b, "input_bytes": 100 * b,
            "output_bytes": 100 * b * (s < 2), "gradient_bytes": 60 * b * (s < 2),
            **{kind: times(factor * (100_000 + 10_000 * b) * (s + 1))
               for kind, factor in (("forward", 1), ("backward", 2), ("recompute", 1))},
        }
        for s in range(3) for b in SIZES
    ]  # fmt: skip
    return {
        "format": "optsched.profile/2",
        "device": {
            "name": "a CPU", "kind": "cpu", "memory_bytes": 0, "threads": 1, "torch": "2.13.0",
            "date": "2025-01-31T12:00:00+00:00", "optsched": "0.1.0",
        },
        "stages": [
            {"name": name, "parameters_bytes": 100, "gradients_bytes": 100,
             "state": [300, 200, 300]}
            for name in ("embed", "block", "head")
        ],
        "jobs": [
            {"name": "a", "batch_size": 4, "optimizer": ADAM},
            {"name": "b", "batch_size": 32, "microbatches": 2, "recompute": True, "optimizer": SGD},
            {"name": "c", "batch_size": 8, "optimizer": ADAM},
        ],
        "blocks": blocks,
        "updates": [
            {"stage": s, "optimizer": optimizer, "dtype": "fp32", **times(ns * (s + 1))}
            for s in range(3) for optimizer, ns in ((ADAM, 50_000), (SGD, 30_500))
        ],
        "link": {"bandwidth": 10**9, "latency_ns": 2000},
    }  # fmt: skip


def times(ns: int) -> dict[str, int]:
    """A median and its spread."""
    return {"n": 10, "median_ns": ns, "iqr_ns": ns // 10, "minimum_ns": ns // 2}


GONE = object()


def made(*edits: Any) -> Profile:
    """The profile of `tree` with other values: path, value, path, value, ..."""
    given = tree()
    for path, value in zip(edits[::2], edits[1::2], strict=True):
        *way, last = [int(k) if k.isdigit() else k for k in re.findall(r"\w+", path)]
        node: Any = given
        for key in way:
            node = node[key]
        if value is GONE:
            del node[last]
        elif isinstance(node, list) and last == len(node):
            node.append(value)
        else:
            node[last] = value
    return from_tree(given, "x.json")


# the document


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Write, read, write: equal profiles and bytes; the order of the fields does not count."""
    profile = made()
    profile.write(tmp_path / "x.profile.json")
    again = Profile.read(tmp_path / "x.profile.json")
    assert again == profile
    assert to_bytes(again) == (tmp_path / "x.profile.json").read_bytes()
    assert from_tree(dict(reversed(tree().items()))) == profile
    with pytest.raises(AttributeError):
        profile.blocks[0].batch = 1  # type: ignore[misc]
    with pytest.raises(InputError, match=r"^path: expected the name of a file"):
        profile.write(3)  # type: ignore[arg-type]


def test_the_table_says_what_matters() -> None:
    """Medians, bytes, and how much the times scatter."""
    profile = made("blocks[0].forward.iqr_ns", 70_000)
    text = str(profile)
    for part in ("embed", "140 us", "280 us", "400 B", "a CPU", "up to 50%"):
        assert part in text
    assert profile.spread == 0.5


REFUSED: list[tuple[str, Any, str]] = [
    ("format", "optsched.profile/3", "newer than this optsched"),
    ("link", GONE, 'the field "link" is missing'),
    ("extra", 1, 'unknown field "extra"'),
    ("jobs", [], "jobs: expected at least one, got none"),
    ("jobs[1].name", "a", 'jobs[1]: "a" is also in jobs[0]'),
    ("stages[2].name", "embed", 'stages[2]: "embed" is also in stages[0]'),
    ("jobs[0].name", "", "jobs[0].name: "),
    ("jobs[0].microbatches", 5, "jobs[0].microbatches: expected an integer in 1..4, got 5"),
    ("jobs[0].precision", "fp64", "blocks: stage 0 at micro-batch 4 in fp64 is missing"),
    ("jobs[2].optimizer", "X", "updates: stage 0 by X in fp32 is missing"),
    ("stages[1].state[2]", GONE, "stages[1].state: expected one number per job (3), got 2"),
    ("stages[1].state[0]", -1, "stages[1].state[0]: expected"),
    ("device.date", "yesterday", "device.date: expected"),
    ("blocks[0].dtype", "W", "blocks[0].dtype: expected one of"),
    ("blocks[3].stage", 9, "blocks[3]: stage 9 at micro-batch 4 in fp32: no such stage"),
    ("updates[3].stage", 9, f"updates[3]: stage 9 by {SGD} in fp32: no such stage"),
    ("updates[3].optimizer", "X", "updates[3]: stage 1 by X in fp32: no such"),
    ("blocks[0].batch", 0, "blocks[0].batch: expected an integer >= 1, got 0"),
    ("blocks[0].forward.median_ns", 1.5, "blocks[0].forward.median_ns: expected"),
    ("blocks[0].recompute.n", True, "blocks[0].recompute.n: expected an integer"),
    ("blocks[0].backward", GONE, 'blocks[0]: the field "backward" is missing'),
    ("blocks[9]", tree()["blocks"][0], "blocks[9]: stage 0 at micro-batch 4 in fp32 is also in"),
    ("blocks[0]", GONE, "blocks: stage 0 at micro-batch 4 in fp32 is missing"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
def test_a_wrong_document_is_refused_by_field(field: str, value: Any, sentence: str) -> None:
    """One sentence that begins with the file and names the field."""
    with pytest.raises(InputError, match=rf"^x\.json: .*{re.escape(sentence)}"):
        made(field, value)


@given(st.randoms(use_true_random=False))
def test_any_change_is_read_or_refused(draw: Any) -> None:
    """Whatever one place of a document is replaced by: a profile or an `InputError`."""
    given_tree = tree()
    node: Any = given_tree
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], (dict, list)) or not node[key] or draw.random() < 0.2:
            break
        node = node[key]
    node[key] = draw.choice([None, True, -1, 0, 1, 7, 2**53, 1.5, "", "a", "F", "fp64", [], {}])
    try:
        profile = from_tree(given_tree, "x.json")
    except InputError as error:
        assert str(error).startswith("x.json: ")
    else:
        assert str(profile)
        for job in range(len(profile.jobs)):
            assert profile.block(0, profile.jobs[job].batch, profile.jobs[job].precision)


# the problem


def test_times_bytes_and_lags() -> None:
    """Every field, by hand; job b has micro-batches of 16."""
    array = made().problem()
    stages = [1, 2, 3]
    expected = {
        "forward": [[140_000 * s for s in stages], [260_000 * s for s in stages],
                    [180_000 * s for s in stages]],
        "lag_forward": [[2400] * 2, [3600] * 2, [2800] * 2],
        "lag_backward": [[2240] * 2, [2960] * 2, [2480] * 2],
        "activation": [[2000] * 3, [8000] * 3, [4000] * 3],
        "checkpoint": [[400] * 3, [1600] * 3, [800] * 3],
        "state": [[300] * 3, [200] * 3, [300] * 3],
        "micro_batches": [1, 2, 1], "batch_size": [4, 32, 8],
    }  # fmt: skip
    assert {key: getattr(array, key).tolist() for key in expected} == expected
    assert (array.backward == 2 * array.forward).all()
    assert (array.recompute == array.forward).all()
    assert array.update.tolist()[1] == [30_500, 61_000, 91_500]
    assert (array.recompute_workspace == array.activation - array.checkpoint).all()
    assert array.recomputes == (False, True, False)
    assert (array.names, array.objective, array.update_mode) == (("a", "b", "c"), "period", "fused")
    assert array.time_unit == "ns"  # the shortest block has 30.5 us
    assert array.update_blocks_gradient  # the executor sends when the whole block is done


def test_units_and_links() -> None:
    """Microseconds once the shortest block has 100 of them, rounded up; no link on one device."""
    given = tree()
    for one in [b[key] for b in given["blocks"] for key in KINDS] + given["updates"]:
        one["median_ns"] = one["median_ns"] * 10 + 1
    array = from_tree(given).problem(place=[0, 0, 1])
    assert (array.time_unit, array.n_devices) == ("us", 2)
    assert array.forward.tolist()[0] == [1401, 2801, 4201]
    assert array.lag_forward.tolist()[0] == [0, 3]  # 2.4 us


def test_memory_is_what_states_leave() -> None:
    """States of all jobs and the gradients of those that hold them are subtracted."""
    array = made().problem(memory=100_000)
    # job b has two micro-batches, so every job may hold gradients
    assert array.memory.tolist() == [100_000 - 800 - 300] * 3
    alone = made().problem(jobs=[0, 2], memory=[10_000, 20_000, 30_000])
    assert alone.memory.tolist() == [9_300, 19_300, 29_300]
    joint = made().problem(jobs=[0, 2], memory="1MB", place=[0, 1, 1])
    assert joint.memory.tolist() == [2**20 - 700, 2**20 - 1400]
    known = made("device.memory_bytes", 10**6).problem(memory="device")
    assert known.memory.tolist() == [950_000 - 1100] * 3


def test_clipping_needs_global_updates() -> None:
    """The mode follows from the jobs, and another one is refused by the job's name."""
    profile = made("jobs[1].update", "global")
    assert profile.problem().update_mode == "global"
    assert profile.problem(jobs=[0, 2]).update_mode == "fused"
    assert profile.problem(jobs=[0, 2], update_mode="block").update_mode == "block"
    with pytest.raises(InputError, match="update_mode: job b clips"):
        profile.problem(update_mode="fused")


def new(**changes: Any) -> Any:
    """Asks for the problem of a job that was not profiled."""
    job = ProfiledJob(**{"name": "x", "batch_size": 8, **changes})
    return lambda profile: profile.problem(jobs=[job])


def problem(**options: Any) -> Any:
    """Asks for a problem."""
    return lambda profile: profile.problem(**options)


WRONG: list[tuple[Any, str]] = [
    (new(batch_size=12), "batch: micro-batches of 12 samples in fp32 were not measured"),
    (problem(split_backward=True), "split_backward: the profile has no times"),
    (problem(forward=[[1]]), "forward: settled by the profile"),
    (problem(weight=[[1]]), "weight: settled by the profile"),
    (problem(link=3), r"link: expected a Link"),
    (problem(colour=1), "colour: a JobArray has no such field"),
    (problem(jobs=[3]), r"jobs\[0\]: expected an integer in 0..2"),
    (problem(jobs=[]), "jobs: expected a list"),
    (problem(jobs="a"), "jobs: expected a list"),
    (problem(jobs=[None]), r"jobs\[0\]: expected a job or its number"),
    (new(batch_size=0), r"jobs\[0\].batch_size: expected"),
    (new(microbatches=9), r"jobs\[0\].microbatches: expected .*1..8"),
    (new(optimizer="X"), r"jobs\[0\]: was not measured; measured are AdamW"),
    (new(precision="bf16"), r"jobs\[0\]: was not measured"),
    (problem(place=[0, 1]), "place: expected one device per stage"),
    (problem(place=[0, 0, 5]), "place: device 1 has no stage"),
    (problem(memory=[1, 2]), "memory: expected bytes of 3 devices"),
    (problem(memory=0), "memory: "),
    (problem(memory=900), "memory: device 0 has 900 bytes.*take 1100.*at most 2 jobs would fit"),
    (problem(memory="device"), "memory: that of a CPU is unknown"),
    (problem(update_mode="x"), "update_mode: expected one of"),
    (problem(objective="x"), "objective: expected one of"),
    (problem(recompute_mode="x"), "recompute_mode: expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), WRONG)
def test_wrong_questions_are_refused(call: Any, sentence: str) -> None:
    """The sentence names the argument."""
    with pytest.raises(InputError, match=f"^{sentence}"):
        call(made())


def test_jobs_by_their_settings() -> None:
    """A job of a measured size; one of a known name has that job's optimizer."""
    profile = made()
    inside = ProfiledJob(name="new", batch_size=16, optimizer=SGD)
    array = profile.problem(jobs=[0, inside])
    assert array.forward[1, 0] == 260_000
    assert array.update[1].tolist() == [30_500, 61_000, 91_500]
    other = SimpleNamespace(
        name="", batch_size=16, microbatches=1, recompute=True, needs_norm=True, optimizer=len
    )
    array = profile.problem(jobs=[other])
    assert (array.update_mode, array.recomputes) == ("global", (True,))
    assert array.update[0].tolist() == [50_000, 100_000, 150_000]  # the slowest measured
    named = SimpleNamespace(name="b", batch_size=8, microbatches=1, optimizer=len)
    assert profile.problem(jobs=[named]).update[0, 0] == 30_500


def test_split_backward_and_shared_bytes() -> None:
    """Blocks I and W if they were measured; a frozen base counts once."""
    given = tree()
    for b in given["blocks"]:
        b |= {"input_gradient": times(60_000), "weight": times(50_000), "weight_bytes": 70}
    for stage in given["stages"]:
        stage["shared_bytes"] = 5000
    profile = from_tree(given)
    array = profile.problem(split_backward=True, memory=100_000)
    assert (array.backward == 60_000).all() and (array.weight == 50_000).all()
    assert (array.weight_memory == 70).all()
    assert array.memory.tolist() == [100_000 - 800 - 300 - 5000] * 3
    assert profile.standing_bytes() == [6100] * 3
    assert (profile.problem().backward[0] == [280_000, 560_000, 840_000]).all()


def test_from_profile_makes_the_same_problem() -> None:
    """A profile makes its problem, options included; a path is refused with the way out."""
    profile = made()
    expected = profile.problem(jobs=[0, 1], objective="makespan")
    assert JobArray.from_profile(profile, jobs=[0, 1], objective="makespan") == expected
    for one, rest, sentence in (
        (profile, [4], "stages: settled by the profile"),
        (Path("x.profile.json"), [], r"Profile\.read"),
        ("x.profile.json", [], r"Profile\.read"), ("vgg19", [], "stages: "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            JobArray.from_profile(one, *rest)


def test_one_job_twice_and_devices_without_stages() -> None:
    """Repeated jobs get own names; a device without a stage is there if it is named."""
    array = made().problem([0, 0, 2], place=[0, 0, 2], devices=["x", "y", "z"])
    assert (array.n_jobs, len(set(array.names)), array.n_devices) == (3, 3, 3)
