"""The profile document: strict reading, prediction of other sizes, the way to a problem."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import InputError, JobArray
from optsched.arraypipe.profile.document import Profile, ProfiledJob, from_text, to_bytes
from optsched.arraypipe.profile.fit import Curve, fit_error, monotone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ADAM, SGD = "AdamW(weight_decay)", "SGD(momentum)"
SIZES = (4, 8, 16)


def tree(**changes: Any) -> dict[str, Any]:
    """Three stages and three jobs; F takes 100 us + 10 us a sample and so on, medians exact."""
    jobs = [
        {"name": "a", "batch_size": 4, "optimizer": ADAM},
        {"name": "b", "batch_size": 32, "microbatches": 2, "recompute": True, "optimizer": SGD},
        {"name": "c", "batch_size": 10, "optimizer": ADAM},
    ]
    blocks, boundaries, saved = [], [], []
    for s in range(3):
        for b in SIZES:
            for kind, factor in (("F", 1), ("B", 2), ("R", 1)):
                ns = factor * (100_000 + 10_000 * b) * (s + 1)
                blocks.append(_block(kind, s, b, -1, ns))
            boundaries.append({
                "stage": s, "batch": b, "dtype": "fp32", "bytes": 100 * b * (s < 2),
                "gradient_bytes": 60 * b * (s < 2),
            })  # fmt: skip
            saved.append(
                {"stage": s, "batch": b, "dtype": "fp32", "bytes": 500 * b, "input_bytes": 100 * b}
            )
        blocks += [_block("U", s, 0, 0, 50_000 * (s + 1)), _block("U", s, 0, 1, 30_500 * (s + 1))]
    found = {
        "format": "optsched.profile/1",
        "device": {
            "name": "a CPU", "kind": "cpu", "memory_bytes": 0, "threads": 1, "torch": "2.13.0",
            "date": "2025-01-31T12:00:00+00:00", "optsched": "0.1.0",
        },
        "stages": [
            {"name": name, "parameters_bytes": 100, "gradients_bytes": 100,
             "state": {"a": 300, "b": 200, "c": 300}}
            for name in ("embed", "block", "head")
        ],
        "jobs": jobs,
        "blocks": blocks,
        "boundaries": boundaries,
        "saved": saved,
        "links": {
            "activation": {"bandwidth": 10**9, "latency_ns": 2000},
            "host": {"bandwidth": 10**10, "latency_ns": 5000},
        },
    }  # fmt: skip
    return {**found, **changes}


def _block(kind: str, stage: int, batch: int, job: int, ns: int) -> dict[str, Any]:
    return {
        "kind": kind, "stage": stage, "batch": batch, "job": job, "dtype": "fp32", "n": 10,
        "median_ns": ns, "iqr_ns": ns // 10, "minimum_ns": ns // 2,
    }  # fmt: skip


def made(**changes: Any) -> Profile:
    """The profile of `tree`."""
    return from_text(json.dumps(tree(**changes)), "x.json")


def what_if(**changes: Any) -> ProfiledJob:
    """A job that was not profiled."""
    return ProfiledJob(**{"name": "x", "batch_size": 8, **changes})


def quiet(profile: Profile, *given: Any, **options: Any) -> JobArray:
    """A problem, whatever it warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profile.problem(*given, **options)


class TestDocument:
    """Reading and writing."""

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        """Write, read, write: equal profiles, equal bytes, equal hashes."""
        profile = made()
        profile.write(tmp_path / "x.profile.json")
        again = Profile.read(tmp_path / "x.profile.json")
        assert again == profile
        assert hash(again) == hash(profile)
        assert again.sha256 == profile.sha256
        assert to_bytes(again) == (tmp_path / "x.profile.json").read_bytes()
        profile.save(tmp_path / "y.profile.json")
        assert (tmp_path / "y.profile.json").read_bytes() == to_bytes(profile)

    def test_the_hash_is_of_the_content(self) -> None:
        """Spaces and the order of keys do not count, a nanosecond does."""
        text = json.dumps(dict(reversed(tree().items())), indent=3)
        assert from_text(text).sha256 == made().sha256
        other = tree()
        other["blocks"][5]["median_ns"] += 1
        assert from_text(json.dumps(other)).sha256 != made().sha256

    def test_it_is_immutable(self) -> None:
        """Neither the profile nor its entries change."""
        profile = made()
        with pytest.raises(AttributeError):
            profile.jobs = ()  # type: ignore[misc]
        with pytest.raises(AttributeError):
            profile.blocks[0].median_ns = 1  # type: ignore[misc]

    def test_reading_needs_no_torch(self, tmp_path: Path) -> None:
        """Profiles are read and made problems of where torch is not installed."""
        made().write(tmp_path / "x.profile.json")
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "import optsched\n"
            "from optsched.arraypipe import Profile\n"
            f"profile = Profile.read({str(tmp_path / 'x.profile.json')!r})\n"
            "array = optsched.JobArray.from_profile(profile)\n"
            "print(array.n_jobs, array.n_stages)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "3 3\n", done.stderr

    def test_the_table_says_what_matters(self) -> None:
        """Medians, spreads, optimizers and the error of predictions; marks where they scatter."""
        given = tree()
        given["blocks"][0]["iqr_ns"] = given["blocks"][0]["median_ns"] // 2
        profile = from_text(json.dumps(given))
        text = str(profile)
        for word in ("embed", "140 us  50%!", "280 us  10%", ADAM, SGD, "400 B", "a CPU", "mean"):
            assert word in text
        assert len(profile.noisy()) == 1
        assert profile.noisy()[0].startswith("F of stage 0 (embed), micro-batch 4, fp32: IQR 50%")
        assert "!" not in str(made())


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("format", lambda t: t.update(format="optsched.profile/2"), "newer than this optsched"),
    ("missing", lambda t: t.pop("links"), 'the field "links" is missing'),
    ("unknown", lambda t: t.update(extra=1), 'unknown field "extra"'),
    ("no jobs", lambda t: t.update(jobs=[]), "jobs: expected at least one"),
    ("no stages", lambda t: t.update(stages=[]), "stages: expected at least one"),
    ("job twice", lambda t: t["jobs"][1].update(name="a"), r"jobs\[1\].name: \"a\" is also"),
    ("stage twice", lambda t: t["stages"][2].update(name="embed"), r"stages\[2\].name"),
    ("no name", lambda t: t["jobs"][0].update(name=""), r"jobs\[0\].name"),
    ("batch", lambda t: t["jobs"][0].update(batch_size=0), r"jobs\[0\].batch_size: expected"),
    ("micro", lambda t: t["jobs"][0].update(microbatches=5), r"jobs\[0\].microbatches: .*1..4"),
    ("precision", lambda t: t["jobs"][0].update(precision="fp8"), r"jobs\[0\].precision"),
    ("unmeasured", lambda t: t["jobs"][0].update(precision="fp64"), r"dtype: expected fp64"),
    ("update", lambda t: t["jobs"][0].update(update="never"), r"jobs\[0\].update"),
    ("optimizer", lambda t: t["jobs"][2].update(optimizer="X"), "U of stage 0 for job 2 is miss"),
    ("state", lambda t: t["stages"][1]["state"].pop("c"), r"stages\[1\].state: job \"c\" is miss"),
    ("state+", lambda t: t["stages"][1]["state"].update(z=1), r"stages\[1\].state: there is no"),
    ("state-", lambda t: t["stages"][1]["state"].update(a=-1), r"stages\[1\].state"),
    ("date", lambda t: t["device"].update(date="yesterday"), "device.date: expected a date"),
    ("threads", lambda t: t["device"].update(threads=0), "device.threads"),
    ("kind", lambda t: t["device"].update(kind="tpu"), "device.kind"),
    ("block kind", lambda t: t["blocks"][0].update(kind="W"), r"blocks\[0\].kind"),
    ("block stage", lambda t: t["blocks"][3].update(stage=9), r"blocks\[3\].stage: .*0..2, got 9"),
    ("block job", lambda t: t["blocks"][0].update(job=1), r"blocks\[0\].job: expected -1 for F"),
    ("update job", lambda t: t["blocks"][9].update(job=7), r"blocks\[9\].job: expected 0..2"),
    ("update size", lambda t: t["blocks"][9].update(batch=4), r"blocks\[9\].batch"),
    ("no size", lambda t: t["blocks"][0].update(batch=0), r"blocks\[0\].batch: expected an int"),
    ("float", lambda t: t["blocks"][0].update(median_ns=1.5), r"blocks\[0\].median_ns: expected"),
    ("zero", lambda t: t["blocks"][0].update(median_ns=0), r"blocks\[0\].median_ns: expected"),
    ("n", lambda t: t["blocks"][0].update(n=True), r"blocks\[0\].n: expected an integer"),
    ("minimum", lambda t: t["blocks"][0].update(minimum_ns=10**9), r"blocks\[0\].minimum_ns"),
    ("block twice", lambda t: t["blocks"].append(t["blocks"][0]), r"blocks\[33\]: the same case"),
    ("block gone", lambda t: t["blocks"].pop(0), "F of stage 0 at micro-batch 4 in fp32 is mis"),
    ("bytes gone", lambda t: t["saved"].pop(), "saved: stage 2 at micro-batch 16 in fp32 is mis"),
    ("bytes twice", lambda t: t["boundaries"].append(t["boundaries"][0]), r"boundaries\[9\]: the"),
    ("bytes of", lambda t: t["saved"][0].update(batch=5), r"saved\[0\]: no block of stage 0 at"),
    ("link", lambda t: t["links"]["host"].update(bandwidth=0), "links.host.bandwidth"),
]


@pytest.mark.parametrize(("change", "sentence"), [row[1:] for row in HOSTILE], ids=[
    row[0] for row in HOSTILE
])  # fmt: skip
def test_a_wrong_document_is_refused_by_field(
    change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    """One sentence that begins with the file and names the field."""
    given = copy.deepcopy(tree())
    change(given)
    with pytest.raises(InputError, match=rf"^bad\.json: .*{sentence}"):
        from_text(json.dumps(given), "bad.json")


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
        profile = from_text(json.dumps(given_tree), "bad.json")
    except InputError as error:
        assert str(error).startswith("bad.json: ")
    else:
        profile.table()
        for job in range(len(profile.jobs)):
            assert profile.duration("F", 0, 3, job).median_ns >= 0


class TestPrediction:
    """Sizes that were measured are what was measured; others are predicted, and that is said."""

    def test_measured_sizes_are_as_measured(self) -> None:
        """The median itself, even where medians fall with the size."""
        given = tree()
        given["blocks"][0]["median_ns"] = 999_000  # F(0) at 4, above that at 8
        profile = from_text(json.dumps(given))
        assert profile.duration("F", 0, 4) == (999_000, False)
        assert profile.duration("F", 0, 8) == (180_000, False)

    @pytest.mark.parametrize("batch", [1, 3, 5, 10, 17, 100])
    def test_affine_times_are_met_exactly(self, batch: int) -> None:
        """An affine function is continued as it is, on both sides."""
        profile = made()
        for s in range(3):
            expected = (100_000 + 10_000 * batch) * (s + 1)
            assert profile.duration("F", s, batch) == (expected, True)
            assert profile.duration("B", s, batch) == (2 * expected, True)
        assert profile.extrapolates(batch) == (not 4 <= batch <= 16)

    def test_updates_are_the_optimizers_own(self) -> None:
        """U depends on the job's optimizer and on no size."""
        profile = made()
        assert profile.duration("U", 1, 4, job=0) == (100_000, False)
        assert profile.duration("U", 1, 999, job=2) == (100_000, False)
        assert profile.duration("U", 1, 4, job=1) == (61_000, False)

    def test_bytes_are_predicted_alike(self) -> None:
        """Bytes kept with and without recomputation, and those of a state."""
        profile = made()
        assert profile.kept(1, 8) == (4000, 800)
        assert profile.kept(1, 5, job=2) == (2500, 500)
        assert profile.bytes_of("gradient", 0, 32, "fp32") == 60 * 32
        assert [profile.state_bytes(2, j) for j in range(3)] == [300, 200, 300]

    def test_minima_never_count(self) -> None:
        """Other minima, same predictions."""
        given = tree()
        for block in given["blocks"]:
            block["minimum_ns"] = 1
        for batch in (1, 5, 16, 64):
            assert from_text(json.dumps(given)).duration("F", 0, batch) == made().duration(
                "F", 0, batch
            )

    def test_the_error_of_a_size_left_out(self) -> None:
        """By hand: sizes 1, 2, 3 take 10, 40, 30; the middle is predicted as 20."""
        error = fit_error([Curve([(1, 10), (2, 40), (3, 30)])])
        assert error.interpolated_mean == error.interpolated_max == pytest.approx(0.5)
        # without 1: one pooled slope 0 at 35; without 3: slope 30 goes on to 70
        assert error.extrapolated_mean == pytest.approx((25 / 10 + 40 / 30) / 2)
        assert error.extrapolated_max == pytest.approx(25 / 10)
        assert error.cases == 3
        assert made().fit_error.interpolated_max == 0
        assert "50.0%" in str(error)

    def test_two_sizes_say_nothing_about_errors(self) -> None:
        """With fewer than three sizes the error is unknown, not zero."""
        error = fit_error([Curve([(1, 10), (2, 40)])])
        assert error.cases == 0
        assert "not known" in str(error)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            (("W", 0, 4), "kind"), (("F", 3, 4), "stage"), (("F", -1, 4), "stage"),
            (("F", 0, 0), "batch"), (("F", 0, 1.5), "batch"), (("F", 0, 4, 3), "job"),
            (("F", True, 4), "stage"),
        ],
    )  # fmt: skip
    def test_wrong_questions_are_refused(self, given: Any, field: str) -> None:
        """The sentence names the argument."""
        with pytest.raises(InputError, match=f"^{field}: "):
            made().duration(*given)


POINTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 10**6)),
    min_size=1, max_size=7, unique_by=lambda point: point[0],
).map(sorted)  # fmt: skip


class TestCurve:
    """Properties of the fit."""

    @given(POINTS)
    def test_never_falls_and_never_negative(self, points: list[tuple[int, int]]) -> None:
        """Slope >= 0 everywhere, above nothing, not below proportionality for small sizes."""
        curve = Curve(points)
        values = [curve(size) for size in range(1, 300)]
        assert all(b >= a for a, b in pairwise(values))
        assert values[0] >= curve.values[0] / curve.sizes[0] > 0

    @given(POINTS, st.integers(2, 9))
    def test_other_units_change_nothing(self, points: list[tuple[int, int]], k: int) -> None:
        """Values in another unit give the same curve in that unit."""
        one, other = Curve(points), Curve([(size, k * value) for size, value in points])
        for size in (1, 50, 250):
            assert other(size) == k * one(size)

    @given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def test_monotone_is_the_nearest(self, values: list[int]) -> None:
        """Brute force over all ways to pool neighbours finds nothing nearer."""

        def distance(row: list[Fraction]) -> Fraction:
            return Fraction(sum((a - b) ** 2 for a, b in zip(row, values, strict=True)))

        best = Fraction(10**9)
        for cuts in range(2 ** (len(values) - 1)):
            row: list[Fraction] = []
            part: list[int] = []
            for k, value in enumerate(values):
                part.append(value)
                if k + 1 == len(values) or cuts >> k & 1:
                    row += [Fraction(sum(part), len(part))] * len(part)
                    part = []
            if all(b >= a for a, b in pairwise(row)):
                best = min(best, distance(row))
        found = monotone(values)
        assert all(b >= a for a, b in pairwise(found))
        assert distance(found) == best


class TestProblem:
    """From the profile to a `JobArray`."""

    def test_times_bytes_and_lags(self) -> None:
        """Every field, by hand; job b has micro-batches of 16, job c one of 10 (predicted)."""
        array = made().problem()
        assert array.time_unit == "ns"  # the shortest block has 30.5 us
        assert array.objective == "period"
        assert array.forward.tolist() == [
            [140_000 * s for s in (1, 2, 3)],
            [260_000 * s for s in (1, 2, 3)],
            [200_000 * s for s in (1, 2, 3)],
        ]
        assert (array.backward == 2 * array.forward).all()
        assert (array.recompute == array.forward).all()
        assert array.update.tolist()[1] == [30_500, 61_000, 91_500]
        assert array.lag_forward.tolist() == [[2400] * 2, [3600] * 2, [3000] * 2]
        assert array.lag_backward.tolist() == [[2240] * 2, [2960] * 2, [2600] * 2]
        assert array.activation.tolist() == [[2000] * 3, [8000] * 3, [5000] * 3]
        assert array.checkpoint.tolist() == [[400] * 3, [1600] * 3, [1000] * 3]
        assert (array.recompute_workspace == array.activation - array.checkpoint).all()
        assert array.state.tolist() == [[300] * 3, [200] * 3, [300] * 3]
        assert array.micro_batches.tolist() == [1, 2, 1]
        assert array.batch_size.tolist() == [4, 32, 10]
        assert array.recomputes == (False, True, False)
        assert array.names == ("a", "b", "c")
        assert array.update_mode == "fused"
        assert array.update_blocks_gradient  # the executor sends when the whole block is done

    def test_the_unit_keeps_three_digits(self) -> None:
        """Microseconds once the shortest block has 100 of them; rounded up, never down."""
        given = tree()
        for block in given["blocks"]:
            block["median_ns"] = block["median_ns"] * 10 + 1
        array = from_text(json.dumps(given)).problem()
        assert array.time_unit == "us"
        assert array.forward.tolist()[0] == [1401, 2801, 4201]
        assert array.lag_forward.tolist()[0] == [3, 3]  # 2.4 us

    def test_stages_on_one_device_need_no_link(self) -> None:
        """Lags are only between devices."""
        array = made().problem(place=[0, 0, 1])
        assert array.lag_forward.tolist()[0] == [0, 2400]
        assert array.n_devices == 2

    def test_memory_is_what_states_leave(self) -> None:
        """States of all jobs and the gradients of those that hold them are subtracted."""
        array = made().problem(memory=100_000)
        # job b has two micro-batches, so every job may hold gradients
        assert array.memory.tolist() == [100_000 - 800 - 300] * 3
        alone = made().problem(jobs=[0, 2], memory=[10_000, 20_000, 30_000])
        assert alone.memory.tolist() == [9_300, 19_300, 29_300]
        joint = made().problem(jobs=[0, 2], memory="1MB", place=[0, 1, 1])
        assert joint.memory.tolist() == [2**20 - 700, 2**20 - 1400]

    def test_states_that_do_not_fit_are_refused(self) -> None:
        """With the device, the bytes, and how many jobs would fit."""
        with pytest.raises(InputError, match=r"device 0 has 900 bytes.*take 1100.*at most 2 jobs"):
            made().problem(memory=900)
        with pytest.raises(InputError, match="memory: the profile does not know"):
            made().problem(memory="device")
        known = made(device={**tree()["device"], "memory_bytes": 10**6})
        assert known.problem(memory="device").memory.tolist() == [950_000 - 1100] * 3

    def test_clipping_needs_global_updates(self) -> None:
        """The mode follows from the jobs, and another one is refused by the job's name."""
        given = tree()
        given["jobs"][1]["update"] = "global"
        profile = from_text(json.dumps(given))
        assert profile.problem().update_mode == "global"
        assert profile.problem(jobs=[0, 2]).update_mode == "fused"
        assert profile.problem(jobs=[0, 2], update_mode="block").update_mode == "block"
        with pytest.raises(InputError, match="update_mode: job b clips"):
            profile.problem(update_mode="fused")

    def test_unmeasured_jobs_are_predicted_and_extrapolation_is_said(self) -> None:
        """A job by its settings; a size outside the measured ones is warned about by name."""
        profile = made()
        inside = ProfiledJob(name="new", batch_size=12, optimizer=SGD)
        array = profile.problem(jobs=[0, inside])
        assert array.forward[1, 0] == 220_000
        assert array.update[1].tolist() == [30_500, 61_000, 91_500]
        outside = SimpleNamespace(
            name="", batch_size=64, microbatches=1, recompute=True, clip_norm=1.0, optimizer=len
        )
        with pytest.warns(UserWarning, match=r"job job0: micro-batch 64 .* 4..16: .*extrapolated"):
            array = profile.problem(jobs=[outside])
        assert array.forward[0, 0] == 740_000
        assert array.update_mode == "global"
        assert array.recomputes == (True,)
        assert array.update[0].tolist() == [50_000, 100_000, 150_000]  # the dearest there is
        named = SimpleNamespace(name="b", batch_size=8, microbatches=1, optimizer=len)
        assert profile.problem(jobs=[named]).update[0, 0] == 30_500

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"forward": [[1]]}, "forward: settled by the profile"),
            ({"colour": 1}, "colour: not an option"),
            ({"jobs": [3]}, r"jobs\[0\]: expected an integer in 0..2"),
            ({"jobs": []}, "jobs: expected a list"),
            ({"jobs": "a"}, "jobs: expected a list"),
            ({"jobs": [None]}, r"jobs\[0\]: expected a job or its number"),
            ({"jobs": [what_if(batch_size=0)]}, r"jobs\[0\].batch_size: expected"),
            ({"jobs": [what_if(microbatches=9)]}, r"jobs\[0\].microbatches: expected .*1..8"),
            ({"jobs": [what_if(optimizer="X")]}, r"jobs\[0\].optimizer: \"X\" was not measured"),
            ({"place": [0, 1]}, "place: expected one device per stage"),
            ({"memory": [1, 2]}, "memory: expected bytes of 3 devices"),
            ({"memory": 0}, "memory: "),
            ({"update_mode": "x"}, "update_mode: expected one of"),
            ({"objective": "x"}, "objective: expected one of"),
            ({"recompute_mode": "x"}, "recompute_mode: expected one of"),
        ],
    )
    def test_wrong_options_are_refused(self, options: dict[str, Any], sentence: str) -> None:
        """The sentence names the option."""
        with pytest.raises(InputError, match=f"^{sentence}"):
            made().problem(**options)

    def test_a_job_of_another_precision_is_refused(self) -> None:
        """What was not measured in bf16 cannot be predicted for it."""
        job = ProfiledJob(name="x", batch_size=4, precision="bf16")
        with pytest.raises(InputError, match=r"jobs\[0\].precision: bf16 was not measured"):
            made().problem(jobs=[job])

    def test_a_schedule_knows_its_profile(self) -> None:
        """Through the solver, by the problem's name; another profile's is told apart."""
        profile = made()
        other = made(device={**tree()["device"], "threads": 2})
        array = profile.problem(objective="makespan", name="my array")
        assert array.name.startswith("my array profile ")
        schedule = optsched.solve(array, "dispatch").schedule
        assert schedule is not None
        assert profile.made(schedule)
        assert not other.made(schedule)
        told = schedule.with_orders(
            schedule.sequences, schedule.start, None, {"profile_sha256": other.sha256}
        )
        assert other.made(told)
        assert not profile.made(told)
        for own, foreign, run in ((profile, other, told), (other, profile, schedule)):
            assert foreign.gap(run) == ""
            assert f"with profile {foreign.sha256[:12]}, not with {own.sha256[:12]}" in own.gap(run)
        odd = schedule.with_orders(
            schedule.sequences, schedule.start, None, {"profile_sha256": profile.sha256[:3]}
        )
        assert not profile.made(odd) and other.gap(odd) == ""
        bare = optsched.solve(JobArray([[1]], [[2]]), "dispatch").schedule
        assert bare is not None
        assert not profile.made(bare)
        assert profile.gap(bare) == ""
        assert profile.made(optsched.solve(array.without(1), "dispatch").schedule)  # type: ignore[arg-type]

    def test_from_profile_is_the_way_in(self, tmp_path: Path) -> None:
        """A profile makes its problem, options included; a path is refused with the way out."""
        profile = made()
        path = tmp_path / "x.profile.json"
        profile.write(path)
        expected = profile.problem(jobs=[0, 1], objective="makespan")
        for way in (profile, type(profile).read(path)):
            assert JobArray.from_profile(way, jobs=[0, 1], objective="makespan") == expected
        with pytest.raises(InputError, match="stages: settled by the profile"):
            JobArray.from_profile(profile, 4)
        for name in (path, str(path)):
            with pytest.raises(InputError, match=r"Profile\.read"):
                JobArray.from_profile(name)
        with pytest.raises(InputError, match="stages: "):
            JobArray.from_profile("vgg19")

    @given(
        batches=st.lists(st.integers(1, 64), min_size=1, max_size=4),
        parts=st.integers(1, 3),
        memory=st.one_of(st.none(), st.integers(10**6, 10**7)),
    )
    def test_problems_are_whole(self, batches: list[int], parts: int, memory: int | None) -> None:
        """Any jobs: legal arrays with times that do not fall with the size, and a bound."""
        jobs = [
            ProfiledJob(name=f"j{k}", batch_size=b, microbatches=min(parts, b))
            for k, b in enumerate(batches)
        ]
        array = quiet(made(), jobs=jobs, memory=memory)
        sizes = [job.batch for job in jobs]
        assert sizes == [-(-b // min(parts, b)) for b in batches]
        order = sorted(range(len(jobs)), key=sizes.__getitem__)
        for field in (array.forward, array.backward, array.activation, array.lag_forward):
            rows = field[order].tolist()
            for row, later in pairwise(rows):
                assert all(a <= b for a, b in zip(row, later, strict=True))
        assert array.lower_bound() > 0
        assert array.infeasibility() == "" or memory is not None


def test_entries_are_what_the_page_says() -> None:
    """The fields of an entry are the columns of the document."""
    text = json.loads(to_bytes(made()))
    assert list(text) == [
        "format", "device", "stages", "jobs", "blocks", "boundaries", "saved", "links",
    ]  # fmt: skip
    first = made().blocks[0]
    assert msgspec.json.decode(msgspec.json.encode(first)) == {
        "kind": "F", "stage": 0, "batch": 4, "job": -1, "dtype": "fp32", "n": 10,
        "median_ns": 140_000, "iqr_ns": 14_000, "minimum_ns": 70_000, "launch_ns": 0,
    }  # fmt: skip


def test_a_wrong_word_is_answered_with_the_right_ones() -> None:
    """Allowed values are named."""
    document = tree()
    document["blocks"][0]["kind"] = "Q"
    with pytest.raises(InputError, match=r'blocks\[0\].kind: expected one of "B", "F", "R", "U"'):
        from_text(json.dumps(document))


def test_paths_that_are_none() -> None:
    """A number and a folder are refused in words."""
    found = from_text(json.dumps(tree()))
    with pytest.raises(InputError, match=r"^path: expected the name of a file"):
        found.save(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a directory"):
        type(found).read("/")


@pytest.mark.filterwarnings("ignore")
def test_one_job_twice_and_devices_without_stages() -> None:
    """Repeated jobs get own names; a gap in `place` is refused unless devices are named."""
    found = from_text(json.dumps(tree()))
    array = found.problem([0, 0, 2])
    assert array.n_jobs == 3 and len(set(array.names)) == 3
    with pytest.raises(InputError, match="place: device 1 has no stage"):
        found.problem(place=[0, 0, 5])
    assert found.problem(place=[0, 0, 2], devices=["x", "y", "z"]).n_devices == 3
