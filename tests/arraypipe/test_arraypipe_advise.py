"""`advise`: one job per GPU, 1F1B or the array, and when nothing fits."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched.arraypipe.advice import advise
from optsched.arraypipe.profile import Profile, from_tree
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

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
    found = json.loads(json.dumps(advice.as_dict()))
    assert advice.best is not None and found["best"] == advice.best.name
    for changes, sentence in (
        ({"devices": 0}, "devices: "), ({"memory": "much"}, "memory: "), ({"jobs": []}, "jobs: "),
        ({"profile": 7}, "path: "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^{sentence}"):
            advise(**{"profile": known, **changes})  # type: ignore[arg-type]
