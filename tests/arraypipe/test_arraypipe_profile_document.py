"""The profile document: strict reading, and the problem that it makes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from optsched import InputError
from optsched.arraypipe.profile import Profile, from_tree, to_bytes

if TYPE_CHECKING:
    from pathlib import Path


ADAM, SGD = "AdamW(weight_decay)", "SGD(momentum)"
SIZES, KINDS = (4, 8, 16), ("forward", "backward", "recompute")


def tree() -> dict[str, Any]:
    """Three stages and three jobs; F takes 100 us + 10 us a sample and so on."""
    blocks = [
        {
            "stage": s, "batch": b, "dtype": "fp32", "saved_bytes": 500 * b, "input_bytes": 100 * b,
            "output_bytes": 100 * b * (s < 2), "gradient_bytes": 60 * b * (s < 2),
            **{kind: factor * (100_000 + 10_000 * b) * (s + 1)
               for kind, factor in zip(KINDS, (1, 2, 1), strict=True)},
        }
        for s in range(3) for b in SIZES
    ]  # fmt: skip
    return {
        "format": "optsched.profile/3",
        "device": {
            "name": "a CPU", "kind": "cpu", "memory_bytes": 0, "threads": 1, "torch": "2.13.0",
            "date": "2025-01-31T12:00:00+00:00", "optsched": "0.1.0",
        },
        "stages": [
            {"name": name, "gradients_bytes": 100, "state": [300, 200, 300]}
            for name in ("embed", "block", "head")
        ],
        "jobs": [
            {"name": "a", "batch_size": 4, "optimizer": ADAM},
            {"name": "b", "batch_size": 32, "microbatches": 2, "recompute": True, "optimizer": SGD},
            {"name": "c", "batch_size": 8, "optimizer": ADAM},
        ],
        "blocks": blocks,
        "updates": [
            {"stage": s, "optimizer": optimizer, "dtype": "fp32", "time": ns * (s + 1)}
            for s in range(3) for optimizer, ns in ((ADAM, 50_000), (SGD, 30_500))
        ],
        "link": {"bandwidth": 10**9, "latency_ns": 2000},
    }  # fmt: skip


GONE = object()


def made(*edits: Any) -> Profile:
    """The profile of `tree` with other values: path, value, path, value, ..."""
    given = tree()
    for path, value in zip(edits[::2], edits[1::2], strict=True):
        *parents, last = [int(k) if k.isdigit() else k for k in re.findall(r"\w+", path)]
        node: Any = given
        for key in parents:
            node = node[key]
        if value is GONE:
            del node[last]
        elif isinstance(node, list) and last == len(node):
            node.append(value)
        else:
            node[last] = value
    return from_tree(given, "x.json")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Write, read, write: equal profiles and bytes; the order of the fields does not count."""
    profile = made()
    profile.write(tmp_path / "x.profile.json")
    again = Profile.read(tmp_path / "x.profile.json")
    assert again == profile == from_tree(dict(reversed(tree().items())))
    assert to_bytes(again) == (tmp_path / "x.profile.json").read_bytes()
    text = str(profile)
    for part in ("embed", "140 us", "280 us", "400 B", "a CPU", "3 jobs, 3 stages"):
        assert part in text


REFUSED: list[tuple[str, Any, str]] = [
    ("format", "optsched.profile/4", "newer than this optsched"),
    ("link", GONE, 'the field "link" is missing'),
    ("extra", 1, 'unknown field "extra"'),
    ("jobs", [], "jobs: expected at least one, got none"),
    ("jobs[1].name", "a", 'jobs[1]: "a" is also in jobs'),
    ("jobs[0].microbatches", 5, "jobs[0].microbatches: expected an integer in 1..4, got 5"),
    (
        "jobs[0].precision",
        "fp64",
        "jobs[0]: batch: micro-batches of 4 samples in fp64 were not measured",
    ),
    ("jobs[2].optimizer", "X", "jobs[2]: no update of stage 0 by X"),
    ("stages[1].state[2]", GONE, "stages[1].state: expected one number per job (3), got 2"),
    ("stages[1].state[0]", -1, "stages[1].state[0]: expected"),
    ("device.date", "yesterday", "device.date: expected"),
    ("blocks[0].dtype", "W", "blocks[0].dtype: expected one of"),
    ("blocks[3].stage", 9, "blocks[3].stage: expected an integer in 0..2, got 9"),
    ("blocks[0].batch", 0, "blocks[0].batch: expected an integer >= 1, got 0"),
    ("blocks[0].forward", 1.5, "blocks[0].forward: expected"),
    ("blocks[0].backward", GONE, 'blocks[0]: the field "backward" is missing'),
    ("blocks[9]", tree()["blocks"][0], "blocks: two of a stage and a case"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
def test_a_wrong_document_is_refused_by_field(field: str, value: Any, sentence: str) -> None:
    """One sentence that begins with the file and names the field."""
    with pytest.raises(InputError, match=rf"^x\.json: .*{re.escape(sentence)}"):
        made(field, value)


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


def test_memory_is_what_states_leave() -> None:
    """States of all jobs and the gradients of those that hold them are subtracted."""
    array = made().problem(memory=100_000)
    # job b has two micro-batches, so every job may hold gradients
    assert array.memory.tolist() == [100_000 - 800 - 300] * 3
    alone = made().problem(jobs=[0, 2], memory=10_000)
    assert alone.memory.tolist() == [9_300] * 3
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


class Given:
    """What a profile reads of a `Job`."""

    def __init__(self, name: str = "", batch_size: int = 8, **changes: Any) -> None:
        self.name, self.batch_size, self.microbatches, self.precision = name, batch_size, 1, "fp32"
        self.recompute = self.needs_norm = False
        vars(self).update(changes)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"jobs": [Given(batch_size=12)]}, "batch: micro-batches of 12 samples in fp32 were not"),
    ({"jobs": [Given(precision="bf16")]}, r"jobs\[0\].precision: bf16 was not measured"),
    ({"jobs": [3]}, r"jobs\[0\]: expected an integer in 0..2"),
    ({"jobs": []}, "jobs: expected a list"),
    ({"jobs": [None]}, r"jobs\[0\]: expected a job or its number"),
    ({"forward": [[1]]}, "forward: settled by the profile"),
    ({"weight": [[1]]}, "weight: settled by the profile"),
    ({"colour": 1}, "colour: a JobArray has no such field"),
    ({"place": [0, 1]}, "place: expected one device per stage"),
    ({"memory": 0}, "memory: "),
    ({"memory": 900}, "memory: device 0 has 900 bytes.*take 1100.*at most 2 jobs would fit"),
    ({"memory": "device"}, "memory: that of a CPU is unknown"),
    ({"update_mode": "x"}, "update_mode: expected one of"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_wrong_questions_are_refused(options: dict[str, Any], sentence: str) -> None:
    """The sentence names the argument."""
    with pytest.raises(InputError, match=f"^{sentence}"):
        made().problem(**options)


def test_jobs_by_their_settings() -> None:
    """A `Job` of a measured size; one of a known name has that job's optimizer and state."""
    profile = made()
    array = profile.problem([0, Given("new", 16, recompute=True, needs_norm=True)])
    assert array.forward[1, 0] == 260_000 and array.update[1, 0] == 50_000
    assert (array.update_mode, array.recomputes) == ("global", (False, True))
    known = profile.problem([Given("b")])
    assert known.update[0, 0] == 30_500 and known.state.tolist() == [[200] * 3]
    assert profile.problem([0, 0, 2]).names == ("a", "a (2)", "c")


def test_shared_bytes() -> None:
    """A frozen base counts once."""
    given = tree()
    for stage in given["stages"]:
        stage["shared_bytes"] = 5000
    profile = from_tree(given)
    assert profile.problem(memory=100_000).memory.tolist() == [100_000 - 800 - 300 - 5000] * 3
    assert profile.standing_bytes() == [6100] * 3
