"""The profile document: strict reading, and the problem that it makes."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError
from optsched.arraypipe.advice import advise
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
        "format": "optsched.profile/2",
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
    ("format", "optsched.profile/3", "newer than this optsched"),
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
    ({"split_backward": True}, "split_backward: the profile has no times"),
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


def test_split_backward_and_shared_bytes() -> None:
    """Blocks I and W if they were measured; a frozen base counts once."""
    given = tree()
    for b in given["blocks"]:
        b |= {"input_gradient": 60_000, "weight": 50_000}
    for stage in given["stages"]:
        stage["shared_bytes"] = 5000
    profile = from_tree(given)
    array = profile.problem(split_backward=True, memory=100_000)
    assert (array.backward == 60_000).all() and (array.weight == 50_000).all()
    kept = [array.activation[0], array.checkpoint[1], array.activation[2]]
    assert (array.weight_memory == kept).all()
    assert array.memory.tolist() == [100_000 - 800 - 300 - 5000] * 3
    assert profile.standing_bytes() == [6100] * 3
    assert (profile.problem().backward[0] == [280_000, 560_000, 840_000]).all()


# advice


GB = 1 << 30


def profile(
    stages: int = 4, batches: tuple[int, ...] = (8,) * 8, *, microbatches: int = 1,
    base: int = 1_000_000, per: int = 100_000, state: int = GB, kept: int = 1 << 20,
    memory: int = 80 * GB,
) -> Profile:  # fmt: skip
    """Equal stages: F takes ``base + per * size`` nanoseconds, B twice that."""
    names = ("input_bytes", "output_bytes", "gradient_bytes")
    sizes = sorted({-(-b // microbatches) for b in batches})
    return from_tree({
        "format": "optsched.profile/2",
        "device": {"name": "D", "kind": "cuda", "memory_bytes": memory, "threads": 1, "torch": "2",
                   "date": "2026-01-01", "optsched": "0"},
        "stages": [{"name": f"s{s}", "gradients_bytes": state // 3, "state": [state] * len(batches)}
                   for s in range(stages)],
        "jobs": [{"name": f"j{k}", "batch_size": b, "microbatches": microbatches}
                 for k, b in enumerate(batches)],
        "blocks": [
            {"stage": s, "batch": b, "dtype": "fp32", "forward": base + per * b,
             "backward": 2 * (base + per * b), "recompute": base + per * b,
             "saved_bytes": kept * b, **dict.fromkeys(names, 1024 * b)}
            for s, b in product(range(stages), sizes)
        ],
        "updates": [{"stage": s, "optimizer": "", "dtype": "fp32", "time": 1_000}
                    for s in range(stages)],
        "link": {"bandwidth": 10**10, "latency_ns": 20_000},
    })  # fmt: skip


WINNERS: list[tuple[str, dict[str, Any], float]] = [
    # everything fits and there are twice as many equal jobs as devices: no idle time, exact
    ("one job per GPU", {}, 2 * (4 * 3 * 1_800_000 + 4_000) / 1e9),
    # too large for one device, batches of one sample, as many jobs as stages
    ("job array", {"batches": (1,) * 4, "state": 6 * GB, "memory": 30 * GB}, 4 * 3.3e-3),
    # one job too large for a device, of many micro-batches
    ("1F1B", {"batches": (64,), "microbatches": 64, "state": 12 * GB, "memory": 30 * GB},
     64 * 3.3e-3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "setting", "seconds"), WINNERS)
def test_known_winners(name: str, setting: dict[str, Any], seconds: float) -> None:
    """The rules of the page, each where the winner is known; its time is near a bound."""
    advice = advise(profile(**setting), devices=4)
    found, best = advice[name].seconds, advice.best
    assert found is not None and best is not None and best.seconds is not None
    assert seconds * 0.9999 <= found <= seconds * 1.1
    assert best.name == name or found <= 1.01 * best.seconds
    assert advice["one job per GPU"].fits is (name == "one job per GPU")


@few_examples
@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=7),
    st.integers(1, 4),
    st.integers(10_000, 10**7),
    st.integers(0, 10**6),
)
def test_nothing_beats_the_sum_of_work(
    batches: list[int], devices: int, base: int, per: int
) -> None:
    """No option is faster than all devices without idle time; options are sorted."""
    advice = advise(profile(4, tuple(batches), base=base, per=per), devices=devices)
    least = sum(4 * 3 * (base + per * b) for b in batches) / devices / 1e9
    seconds = [option.seconds for option in advice.options if option.seconds is not None]
    assert seconds == sorted(seconds) and seconds[0] >= 0.999 * least
    names = {option.name for option in advice.options}
    assert names == {"one job per GPU", "job array"} | ({"1F1B"} if devices > 1 else set())


def test_memory_that_is_small_smaller_and_unknown() -> None:
    """Recomputation makes it fit, or nothing does; of unknown memory all is taken."""
    tight = advise(profile(kept=3 * GB), devices=4)["one job per GPU"]
    assert tight.fits and tight.recompute and tight.seconds == 2 * (4 * 4 * 1_800_000 + 4_000) / 1e9
    advice = advise(profile(), devices=4, memory="1GB")
    assert advice.best is None and all(o.fits is False and o.needed > GB for o in advice.options)
    advice = advise(profile(memory=0, state=500 * GB), devices=4)
    assert advice.best is not None and "unknown memory" in str(advice)
    assert all(option.fits is None and not option.recompute for option in advice.options)


def test_jobs_and_devices() -> None:
    """One device: the same work in another order. Many: arrays side by side."""
    advice = advise(profile(batches=(4, 8)), devices=1)
    assert advice["job array"].seconds == pytest.approx(advice["one job per GPU"].seconds, rel=0.01)
    few, many = (advise(profile(2, memory=0), devices=n) for n in (2, 8))
    for name in ("1F1B", "job array"):
        assert many[name].seconds == pytest.approx(few[name].seconds / 4, rel=0.3)  # type: ignore[operator]
    long = advise(profile(batches=(100_000,), microbatches=100_000), devices=4)
    load = 100_000 * 3 * 1_100_000 / 1e9
    assert long["1F1B"].seconds is not None and load <= long["1F1B"].seconds < 1.05 * load


def test_a_path_is_read_and_the_answer_is_plain(tmp_path: Path) -> None:
    """The document gives the same answer; `as_dict` is JSON."""
    path, known = tmp_path / "x.profile.json", profile()
    known.write(path)
    advice = advise(path)
    assert advice == advise(known)
    assert str(advice).splitlines()[1].startswith("not predicted: drawing batches, time between")
    found = json.loads(json.dumps(advice.as_dict()))
    assert advice.best is not None and found["best"] == advice.best.name
    for changes, sentence in (
        ({"devices": 0}, "devices: "), ({"memory": "much"}, "memory: "), ({"jobs": []}, "jobs: "),
        ({"profile": 7}, "path: "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^{sentence}"):
            advise(**{"profile": known, **changes})  # type: ignore[arg-type]
