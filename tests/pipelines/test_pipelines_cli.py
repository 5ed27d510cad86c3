"""`optsched generate pipeline`: one pipeline, all of them, files, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from optsched import JobArray, Schedule, pipelines, verify
from optsched.errors import InputError
from optsched.pipelines.generator import job_array

if TYPE_CHECKING:
    from program import Cli

SMALL = ("--stages", 4, "--micro-batches", 8)


def test_one_pipeline(cli: Cli) -> None:
    """Headline, devices, and a document that verifies and other commands take."""
    for name in pipelines.NAMES:
        done = cli("generate", "pipeline", name, *SMALL, "-o", "x.schedule.json")
        assert done.code == 0, done.err
        assert "makespan" in done.out and name in done.out
        schedule = Schedule.read(cli.folder / "x.schedule.json")
        assert verify(schedule) == []
        assert schedule.provenance["pipeline"] == name
    assert cli("generate", "pipeline", "gpipe", *SMALL, "-o", "x.schedule.json").code == 0
    assert cli("convert", "x.schedule.json", "x.csv").code == 0
    assert "0F0" in (cli.folder / "x.csv").read_text()


def test_all_side_by_side(cli: Cli) -> None:
    """A line a pipeline; ZB-H2's bubble is gone as a period."""
    assert all(name in cli("generate", "pipeline", "all", *SMALL).out for name in pipelines.NAMES)
    done = cli("generate", "pipeline", "zb_h2", *SMALL, "--objective", "period")
    assert " 0.00 % " in done.out
    done = cli("generate", "pipeline", "all", "--model", "bert_large", *SMALL, "--memory", "8GB",
               "--batch-size", 64)  # fmt: skip
    assert done.code == 0, done.err
    assert "too small" in done.out


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, [12, 12, 12]),
        ({"backward": 5}, [12, 3, 2]),
        ({"forward": 2, "backward": 5, "weight": 2}, [2, 3, 2]),
    ],
    ids=str,
)
def test_times_that_are_left_out(cli: Cli, given: dict[str, int], times: list[int]) -> None:
    """The backward pass is twice the forward pass, and W is half of it; or what is given."""
    words = [word for key, time in given.items() for word in (f"--{key}", time)]
    whole = [times[0], sum(times[1:])]
    for name, kinds, wanted in (("zb_h1", "FIW", times), ("gpipe", "FB", whole)):
        assert cli("generate", "pipeline", name, *SMALL, *words, "-o", "x.schedule.json").code == 0
        schedule = Schedule.read(cli.folder / "x.schedule.json")
        assert {*schedule.kind.tolist()} == {*kinds}
        for kind, time in zip(kinds, wanted, strict=True):
            assert set(schedule.duration[schedule.kind == kind].tolist()) == {time}


def test_a_file(cli: Cli) -> None:
    """A job array of one's own; what its layout does not allow is said in a table."""
    JobArray([[1] * 3], [[2] * 3], micro_batches=4).write(cli.folder / "x.jobarray.json")
    assert " 18 µs " in cli("generate", "pipeline", "one_f_one_b", "x.jobarray.json").out
    done = cli("generate", "pipeline", "all", "x.jobarray.json")
    assert done.code == 0
    assert "needs weight blocks" in " ".join(done.out.split())
    assert "place=zigzag(devices," in done.out


def test_no_published_bubble_is_no_complaint(cli: Cli) -> None:
    """Blocks without time have none, which is no error of the user's."""
    assert " = " not in cli("generate", "pipeline", "gpipe", *SMALL, "--forward", 0).out
    assert " = " in cli("generate", "pipeline", "zb_h1", *SMALL, "--weight", 0).out


REFUSED: list[tuple[list[object], str]] = [
    (["dapple"], "name: expected one of"),
    (["zb_h1", "--backward", 4, "--weight", 5], "error: weight: expected 0..4, a part of"),
    (["gpipe", "--chunks", 3], "gpipe: has one stage a device, --chunks has no meaning"),
    (["gpipe", "--memory", "80GB"], "--memory has no meaning"),
    (["gpipe", "--model", "gpt2_xl", "--forward", 3], "--forward has no meaning"),
    (["all", "-o", "x.schedule.json"], "name one pipeline"),
]


def test_refusals(cli: Cli) -> None:
    """One sentence, exit code 2, no file."""
    for words, message in REFUSED:
        assert message in "error: " + cli.refused("generate", "pipeline", *words)


# job arrays from a model and a seed: what the options change, and what they leave alone


def made(**options: object):  # type: ignore[no-untyped-def]
    """Six BERT jobs on four devices."""
    return job_array("bert_large", 4, 6, seed=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"jitter": 0.2}, {"times": (1, 99)}, {"in_flight": True, "recompute": True}]
)
def test_same_seed_same_array(options: dict[str, object]) -> None:
    """And another seed makes another."""
    assert made(**options) == made(**options)
    other = job_array("bert_large", 4, 6, seed=4, **options)  # type: ignore[arg-type]
    assert other != made(**options)


def test_jitter_stays_within_its_share() -> None:
    """Measured times scatter; every block by its own factor."""
    plain, off = made(), made(jitter=0.05)
    for key in ("forward", "backward"):
        ratio = getattr(off, key) / getattr(plain, key)
        assert (abs(ratio - 1) <= 0.0501).all()
        assert len(np.unique(ratio)) > 1
    assert (off.recompute == plain.recompute).all()


def test_random_times_are_in_their_range() -> None:
    """Both ends included; bytes are those of the model."""
    array = made(times=(5, 9))
    for times in (array.forward, array.backward):
        assert times.min() >= 5
        assert times.max() <= 9
    assert not array.lag_forward.any()
    assert not array.update.any()
    assert (array.activation == made().activation).all()


@pytest.mark.parametrize(("recompute", "kept"), [(False, "activation"), (True, "checkpoint")])
def test_in_flight_holds_what_1f1b_needs(recompute: bool, kept: str) -> None:
    """The largest job on every stage, S - v times."""
    array = made(in_flight=True, recompute=recompute)
    assert (array.memory == getattr(array, kept).max(axis=0) * [4, 3, 2, 1]).all()


def test_names_of_options() -> None:
    """A name lists the options that are not the default."""
    assert made().name == "bert_large-6x4-seed3"
    everything = made(times=(1, 99), memory="80 GB", recompute="choose", objective="period")
    assert everything.name == "bert_large-6x4-seed3-80GB-choose-random1:99-period"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": 1.5}, "jitter: expected a share, 0 to 1, got 1.5"),
        ({"times": (9, 1)}, "times: expected 0 <= least <= most"),
        ({"in_flight": True, "memory": "80GB"}, "in_flight: give it or memory, not both"),
        ({"objective": "speed"}, "objective: expected one of makespan, "),
    ],
)
def test_refusals_generator(options: dict[str, object], message: str) -> None:
    """One sentence with the field and the value."""
    with pytest.raises(InputError, match=message):
        made(**options)
