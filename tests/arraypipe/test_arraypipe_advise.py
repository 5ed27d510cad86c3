"""`advise`: what it ranks, why, and what it says when nothing fits."""

from __future__ import annotations

import json
import math
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched.arraypipe.advice.advise import advise
from optsched.arraypipe.advice.options import Advice, Option
from optsched.arraypipe.advice.situation import longest_first
from optsched.arraypipe.profile.document import Profile, from_tree
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

GB = 1 << 30
NAMES = {"one job per GPU", "1F1B", "interleaved", "job array", "FSDP", "fused"}


def profile(
    stages: int = 4,
    batches: tuple[int, ...] = (8,) * 8,
    *,
    microbatches: int = 1,
    base: int = 1_000_000,
    per: int = 100_000,
    state: int = GB,
    kept: int = 1 << 20,
    memory: int = 80 * GB,
    bandwidth: int = 10**10,
    iqr: float = 0.0,
    update: int = 1_000,
    latency: int = 20_000,
    overhead: int = 0,
) -> Profile:
    """Equal stages: F takes ``base + per * size`` nanoseconds, B twice that."""

    def times(ns: int) -> dict[str, int]:
        return {"n": 10, "median_ns": ns, "iqr_ns": int(iqr * ns), "minimum_ns": 1}

    names = ("saved_bytes", "input_bytes", "output_bytes", "gradient_bytes")
    return from_tree({
        "format": "optsched.profile/1",
        "device": {"name": "D", "kind": "cuda", "memory_bytes": memory, "threads": 1, "torch": "2",
                   "date": "2026-01-01", "optsched": "0", "block_overhead_ns": overhead},
        "stages": [{"name": f"s{s}", "parameters_bytes": state // 3, "gradients_bytes": state // 3,
                    "state": [state] * len(batches)} for s in range(stages)],
        "jobs": [{"name": f"j{k}", "batch_size": b, "microbatches": microbatches}
                 for k, b in enumerate(batches)],
        "blocks": [
            {"stage": s, "batch": b, "dtype": "fp32", "forward": times(base + per * b),
             "backward": times(2 * (base + per * b)), "recompute": times(base + per * b),
             **dict.fromkeys(names, 1024 * b), "saved_bytes": kept * b}
            for s, b in product(range(stages), (1, 2, 4, 8, 16, 32, 64))
        ],
        "updates": [{"stage": s, "optimizer": "", "dtype": "fp32", **times(update)}
                    for s in range(stages)],
        "links": {"activation": {"bandwidth": bandwidth, "latency_ns": latency},
                  "host": {"bandwidth": 25 * 10**9, "latency_ns": 10_000}},
    })  # fmt: skip


def best(advice: Advice) -> str:
    """The name of the best option."""
    assert advice.best is not None
    return advice.best.name


# who wins


LOAD = 2 * 64 * 3 * 100_000 / 1e9
WINNERS: list[tuple[str, dict[str, Any], float, float]] = [
    # if everything fits and there are twice as many equal jobs as devices: no bubbles, exact
    ("one job per GPU", {}, 2 * (4 * 3 * 1_800_000 + 4_000) / 1e9, 0.0),
    # too large for one device, batches of one, as many jobs as stages
    ("job array", {"batches": (1,) * 4, "state": 6 * GB, "memory": 30 * GB}, 4 * 3.3e-3, 0.02),
    # two jobs of large batches whose times are proportional: small bubbles at the best M
    ("1F1B", {"batches": (64, 64), "base": 1_000, "state": 12 * GB, "memory": 30 * GB,
              "kept": 1 << 18}, LOAD, 0.2),
    # one job, weights that a fast link moves behind the computing
    ("FSDP", {"batches": (64,), "base": 1_000, "state": GB // 8, "bandwidth": 10**13,
              "latency": 0}, 4 * 16 * 300_000 / 1e9, 0.1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "setting", "least", "more"), WINNERS)
def test_who_wins(name: str, setting: dict[str, Any], least: float, more: float) -> None:
    """The rules of the page, each where the winner is known; its time is near a bound."""
    advice = advise(profile(**setting), devices=4)
    assert best(advice) == name and (name != "job array" or not advice.too_close)
    assert least * 0.9999 <= advice[name].seconds <= least * (1.0001 + more)
    assert advice["one job per GPU"].fits is (name in ("one job per GPU", "FSDP"))


def test_one_job_too_many_moves_between_devices() -> None:
    """Five equal jobs on four devices take five quarters of one, if some of them move."""
    option = advise(profile(batches=(8,) * 5))["one job per GPU"]
    job = advise(profile(batches=(8,)))["one job per GPU"].seconds
    assert option.seconds == pytest.approx(5 / 4 * job)
    assert f"up to 3 jobs move once, by checkpoint (else {2 * job:.4g})" in option.reason


@few_examples
@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=7),
    st.integers(1, 4),
    st.integers(10_000, 10**7),
    st.integers(0, 10**6),
)
def test_no_option_beats_the_devices_that_are_never_idle(
    batches: list[int], devices: int, base: int, per: int
) -> None:
    """If all fits and no job is longer than the mean load, nothing beats one job per GPU by 1 %.

    Below that jobs are not moved between devices to even out the loads.
    """
    advice = advise(profile(4, tuple(batches), base=base, per=per), devices=devices)
    times = [12 * (base + per * b) for b in batches]
    if max(times) <= sum(times) / devices:
        assert advice.best is not None
        assert advice["one job per GPU"].seconds <= 1.0101 * advice.best.seconds
    assert {option.name for option in advice.options} == NAMES
    seconds = [option.seconds for option in advice.options if option.seconds is not None]
    assert seconds == sorted(seconds)


def test_fused_only_from_a_measured_stack() -> None:
    """Without one there is no time; whole rounds of stacks count, memory and shapes too."""
    given = profile()
    assert advise(given, devices=2)["fused"].seconds is None
    made = advise(given, devices=2, fused={3: 0.001, 4: 0.004})
    assert made["fused"].seconds == pytest.approx(2 * 0.001)  # 3 stacks of 3 on 2 devices
    assert best(made) == "fused"
    tight = advise(given, devices=2, fused={8: 0.001}, memory="20GB")["fused"]
    assert tight.fits is False and "measure smaller stacks" in tight.reason
    unequal = advise(profile(batches=(4, 8)), fused={2: 1e-9})["fused"]
    assert unequal.seconds is None and "batch shapes differ" in unequal.reason
    assert advise(profile(batches=(8,)))["fused"].reason == "needs two jobs or more"


def test_near_times_are_too_close_to_call() -> None:
    """A tie has no winner, with an IQR of 0 too; what does not fit is never the best."""
    options = (
        Option("a", 1.0, ""), Option("b", 1.0004, ""), Option("c", 1.2, ""),
        Option("d", None, "", fits=False),
    )  # fmt: skip
    advice = Advice(options, 1, 1, 0, (1,))
    assert best(advice) == "a"
    assert [option.name for option in advice.close] == ["b"]
    assert "too close to call" in advice.verdict
    assert Advice(options[3:], 1, 1, 0, (1,)).best is None
    assert Advice(options[2:], 1, 1, 0, (1,)).verdict == "best: c"
    assert Advice(options[1:], 1, 1, 0, (1,)).verdict == "best: b, 1.20x as fast as c"
    # the same times with a larger spread: the winner stays, but is not called
    wide = advise(profile(**WINNERS[1][1], iqr=5.0))
    assert best(wide) == "job array" and "too close to call" in str(wide)
    assert wide["job array"].spread == pytest.approx(5 * wide["job array"].seconds, rel=1e-6)


# memory


def test_memory_too_small_for_anything_and_unknown() -> None:
    """No option is possible, and each says the bytes; or all of them are, and that is said."""
    advice = advise(profile(), devices=4, memory="1GB")
    assert advice.best is None and advice.close == ()
    for name in NAMES - {"fused"}:
        option = advice[name]
        assert option.fits is False and option.seconds is None
        assert option.needed > GB and "GiB" in option.reason
    assert "nothing of this is possible" in str(advice)
    advice = advise(profile(memory=0, state=500 * GB), devices=4)
    assert best(advice) == "one job per GPU"
    assert all(option.fits is None for option in advice.options)
    assert "say memory=" in str(advice) and "unknown memory" in str(advice)


def test_arrays_that_do_not_fit_as_they_are() -> None:
    """Sets of jobs, recomputation, smaller micro-batches: whichever is fastest."""
    whole = profile(batches=(1,) * 8, state=6 * GB, memory=80 * GB)
    once, sets = (advise(whole, memory=room)["job array"] for room in (80 * GB, 30 * GB))
    assert "; 2 sets of jobs" in sets.reason and "recompute" not in sets.reason
    assert once.seconds <= sets.seconds == pytest.approx(2 * 4 * 3_300_000 / 1e9, rel=0.02)
    finer = profile(batches=(32,) * 4, state=GB, kept=GB, memory=24 * GB)
    assert "2x as many micro-batches" in advise(finer)["job array"].reason
    tight = profile(batches=(8,) * 4, state=GB, kept=GB // 8, memory=8 * GB)
    few, again = advise(tight, [0, 1])["job array"], advise(tight)["job array"]
    assert "recompute" not in few.reason
    assert again.seconds <= 2 * few.seconds * 1.01 and again.needed <= 8 * GB


# how many of what


def test_how_many_jobs_and_devices() -> None:
    """One device: the same work in another order. Few jobs: chains. Many devices: side by side."""
    advice = advise(profile(batches=(4, 8)), devices=1)
    assert best(advice) == "one job per GPU"
    assert advice["job array"].seconds == pytest.approx(advice["one job per GPU"].seconds)
    for name in ("1F1B", "interleaved", "FSDP"):
        assert advice[name].seconds is None and "two devices" in advice[name].reason
    for count in (1, 2, 3):
        advice = advise(profile(batches=(8,) * count, memory=0), devices=4)
        chain = 4 * 3 * 1_800_000 / 1e9
        assert advice["job array"].seconds >= chain
        assert advice["one job per GPU"].seconds == pytest.approx(chain, rel=1e-3)
    advice = advise(profile(), devices=4)
    assert all(
        "2 groups of 2 dev" in advice[name].reason for name in ("1F1B", "interleaved", "FSDP")
    )
    advice = advise(profile(2, (8,) * 8, state=20 * GB, memory=60 * GB), devices=8)
    assert "4 groups of 2 devices" in advice["1F1B"].reason
    assert "4 arrays of 2 devices" in advice["job array"].reason


def test_many_blocks_and_extreme_times() -> None:
    """Of 100,000 micro-batches no schedule is made; 300 jobs; 1 ns or two weeks a block."""
    given = profile(batches=(100_000,), microbatches=100_000, base=1, per=1000, memory=0)
    advice = advise(given, devices=4)
    load = 100_000 * 3 * 1001 / 1e9
    assert load <= advice["1F1B"].seconds < 1.05 * load
    assert load <= advice["job array"].seconds < 1.3 * load
    many = advise(profile(batches=(8,), memory=0), [0] * 300, devices=4)["job array"]
    assert many.seconds >= 300 * (3 * 1_800_000 + 1_000) / 1e9
    advice = advise(profile(base=1, per=0, update=1), devices=4)
    assert all(math.isfinite(o.seconds) for o in advice.options if o.seconds is not None)
    assert str(advice)
    with pytest.raises(InputError, match=r"add up to [0-9]+, more than 2\^53"):
        advise(profile(base=2**50))


def test_samples_make_epochs_equally_long() -> None:
    """A batch of 2 beside 8 gets four iterations a round."""
    advice = advise(profile(batches=(2, 8)), samples=6400)
    assert advice.iterations == (4, 1)
    single = advise(profile(batches=(2,)))["one job per GPU"].seconds
    assert advice["one job per GPU"].seconds == pytest.approx(4 * single)


def test_jobs_that_were_not_profiled() -> None:
    """Objects with a batch size; sizes in between are predicted, and that is said."""

    def wish(size: int, recompute: bool = False) -> Any:
        return SimpleNamespace(batch_size=size, microbatches=1, recompute=recompute)

    given = profile(batches=(8,), memory=0)
    advice = advise(given, [wish(8), wish(12)], devices=2)
    assert advice.jobs == 2 and "predicted" in advice["one job per GPU"].reason
    one = 4 * 3 * (1_000_000 + 12 * 100_000) / 1e9
    assert advice["one job per GPU"].seconds == pytest.approx(one, rel=1e-3)
    again, own = (advise(given, [wish(8, recompute)])["job array"] for recompute in (True, False))
    assert again.seconds > own.seconds
    once, twice = (advise(given, [0] * n, devices=1)["one job per GPU"] for n in (1, 2))
    assert twice.seconds == pytest.approx(2 * once.seconds)


def test_what_a_block_costs_counts_where_there_are_blocks() -> None:
    """It makes arrays and pipelines slower, and no model that is whole on its device."""
    jobs = (8,) * 4
    bare, known = (advise(profile(batches=jobs, overhead=n), devices=4) for n in (0, 200_000))
    assert known["one job per GPU"].seconds == bare["one job per GPU"].seconds
    slower = known["job array"].seconds - bare["job array"].seconds
    assert slower == pytest.approx(4 * 2 * 200e-6, rel=0.05)
    assert known["1F1B"].seconds > bare["1F1B"].seconds


# the call


def test_a_path_is_read_and_the_answer_is_plain(tmp_path: Path) -> None:
    """The document gives the same answer; `as_dict` is JSON."""
    path, given = tmp_path / "x.profile.json", profile()
    given.write(path)
    advice = advise(path)
    assert advice == advise(str(path)) == advise(given)
    found = json.loads(json.dumps(advice.as_dict()))
    assert found["best"] == best(advice)
    assert [o["name"] for o in found["options"]] == [o.name for o in advice.options]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"devices": 0}, "devices: "), ({"devices": True}, "devices: "),
        ({"devices": 10**9}, "devices: "), ({"memory": "much"}, "memory: "),
        ({"memory": -1}, "memory: "), ({"jobs": []}, "jobs: "), ({"jobs": [99]}, "jobs"),
        ({"fused": {0: 1.0}}, "fused"), ({"fused": {2: math.nan}}, "fused"),
        ({"fused": {}}, "fused"), ({"link": {"speed": 1}}, "link: expected"),
        ({"link": 5}, "link: expected"), ({"samples": 0}, "samples"), ({"profile": 7}, "path: "),
        ({"link": {"bandwidth": 0}}, "link.bandwidth: expected a finite number >= 1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes: dict[str, Any], sentence: str) -> None:
    """Before anything is computed."""
    with pytest.raises(InputError, match=f"^{sentence}"):
        advise(**{"profile": profile(batches=(4, 8)), **changes})


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 4))
def test_longest_first_keeps_its_promise(times: list[int], machines: int) -> None:
    """At most 4/3 - 1/(3m) of the best; brute force is the oracle."""
    found = longest_first(times, machines)
    makespan = max(sum(times[j] for j in row) for row in found)
    least = min(
        max(sum(t for t, m in zip(times, where, strict=True) if m == k) for k in range(machines))
        for where in product(range(machines), repeat=len(times))
    )
    assert sorted(j for row in found for j in row) == list(range(len(times)))
    assert least <= makespan
    assert makespan * 3 * machines <= least * (4 * machines - 1)
