"""Taillard's generator against published hashes, and his two text layouts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import JobShop
from optsched.errors import InputError
from optsched.formats import standard, taillard
from optsched.formats.read_problem import read_problem
from optsched.problems.jobshop import generator, published

if TYPE_CHECKING:
    from pathlib import Path

ALL = "03971f78b728bfceb95d9891887d251a42cd73f54be79b2506cf5b955d38d7c0"
TITLE = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound"
LONG = f"{TITLE}\n 2 2 11 12 6 5\nTimes\n 3 2\n 4 1\nMachines\n 1 2\n 2 1\n"
SHORT = "2 2\n3 2\n4 1\n1 2\n2 1\n"
TOY = [[(0, 3), (1, 2)], [(1, 4), (0, 1)]]


@st.composite
def classics(draw: st.DrawFn) -> JobShop:
    """Classic shops, some with the four facts that the long layout carries."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    facts: dict[str, Any] = {}
    if draw(st.booleans()):
        keys = ("time_seed", "machine_seed", "upper_bound", "lower_bound")
        facts = {key: draw(st.integers(0, 2**31)) for key in keys}
    jobs = [
        [(k, draw(st.integers(0, 2**40))) for k in draw(st.permutations(range(m)))]
        for _ in range(n)
    ]
    return JobShop(jobs, name="f", metadata=facts)


# the generator


def test_all_eighty_instances() -> None:
    """The standard texts of ta01 to ta80 have the published hash."""
    texts = (standard.to_text(published.instance(f"ta{i:02d}")) for i in range(1, 81))
    assert hashlib.sha256("".join(texts).encode()).hexdigest() == ALL


@given(st.integers(1, 2**31 - 2), st.integers(-50, 50), st.integers(0, 200))
def test_draws_are_uniform_integers(seed: int, low: int, width: int) -> None:
    """Draws lie in the range and equal the published floating-point form."""
    stream, x = generator.Lehmer(seed), seed
    for _ in range(20):
        x = 16807 * x % (2**31 - 1)
        drawn = stream.uniform(low, low + width)
        assert drawn == low + int(x / (2**31 - 1) * (width + 1))


@pytest.mark.parametrize("name", ["ta99", "TA41", 41])
def test_unknown_names(name: Any) -> None:
    """An unknown name is answered with the nearest."""
    near = "ta41" if name in ("TA41", 41) else "[a-z]+[0-9]+"
    with pytest.raises(InputError, match=rf"no published job shop .* \(did you mean {near}\?"):
        published.instance(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, 1, 1), "jobs: expected an integer in 1.."),
        ((5, 5, 0, 1), r"time_seed: expected an integer in 1..2147483646, got 0"),
        ((5, 5, 1.0, 1), r"time_seed: .*got 1.0"),
        ((10**7, 10**7, 1, 1), "jobs x machines: expected at most 10000000, got 100000000000000"),
    ],
)
def test_hostile_sizes_and_seeds(arguments: Any, message: str) -> None:
    """Sizes and seeds out of range are refused, and nothing is allocated."""
    with pytest.raises(InputError, match=message):
        generator.generate(*arguments)


# the layouts


@given(classics())
def test_round_trip(shop: JobShop) -> None:
    """Both layouts are read back; seeds and bounds survive as metadata."""
    text = taillard.to_text(shop)
    read = taillard.from_text(text, "f.txt")
    assert read == shop
    assert dict(read.metadata) == dict(shop.metadata)
    assert text.startswith("Nb of jobs") == bool(shop.metadata)


def test_both_layouts_are_detected(tmp_path: Path) -> None:
    """A title line or rows of m numbers mean Taillard; published bounds are only metadata."""
    path = tmp_path / "f.txt"
    for text in (LONG, SHORT, LONG.replace("\n", "\r\n").upper(), "# a comment\n\n" + SHORT):
        path.write_text(text)
        assert read_problem(path) == JobShop(TOY, name="f")
        assert JobShop.read(path, format="taillard") == JobShop(TOY, name="f")
    path.write_text(LONG)
    facts = {"time_seed": 11, "machine_seed": 12, "upper_bound": 6, "lower_bound": 5}
    assert dict(JobShop.read(path).metadata) == facts
    JobShop(TOY, name="f").write(path, format="taillard")
    assert path.read_text() == SHORT


@pytest.mark.parametrize(
    "shop",
    [
        JobShop([[(0, 1), (1, 1)], [(0, 1)]]),
        JobShop(TOY, release=[0, 1]),
    ],
)
def test_what_the_format_cannot_say(shop: JobShop) -> None:
    """Re-entrant shops, skipped machines and windows are not written."""
    with pytest.raises(InputError, match="write it as json"):
        taillard.to_text(shop)


HOSTILE: list[tuple[str, str]] = [
    ("2 2\n3 2\n4 1\n1 2\n", r"^f.txt:4: expected 2 rows of machines, one a job, got 1"),
    ("2 2\n3 2\n4 1\n1 2\n2\n", r"^f.txt:5: expected 2 machines, one a machine, got 1"),
    ("2 2\n3 2\n4 1\n0 1\n1 0\n", r"^f.txt:4: .*1..2, got 0 \(machines are 1-based here\)"),
    ("2 2\n3 2\n4 1\n1 1\n1 2\n", r"^f.txt:4: .*machine 1 twice$"),
    (f"{TITLE}\n2 2 11 12 6\n", r"^f.txt:2: expected six numbers .*got 5"),
    (f"{TITLE}\n2 2 -1 12 6 5\n", r"^f.txt:2: time seed: expected an integer >= 0, got -1"),
    (f"{TITLE}\n2 2 1 1 6 5\n", r'^f.txt:2: expected the line "Times", got the end of the file'),
    (LONG.replace("Machines\n", ""), r'^f.txt:6: expected the line "Machines", got "1 2"'),
    (LONG.replace("Time seed", "Seed"), r"^f.txt:1: expected the title"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE)
def test_hostile_text(text: str, message: str) -> None:
    """Every bad text is refused with file, line, expectation and finding."""
    with pytest.raises(InputError, match=message):
        taillard.from_text(text, "f.txt")
