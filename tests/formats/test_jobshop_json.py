"""JSON job shops: ours, job_shop_lib's, schedule graphs; what is read how, and refusals."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hostile_documents import changed, without

from optsched import Arcs, JobShop, Resource, Schedule
from optsched.errors import InputError
from optsched.formats.read_problem import read_problem
from optsched.io.strict_json import parse
from optsched.problems.jobshop import document

if TYPE_CHECKING:
    from pathlib import Path

TOY = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], ["saw", "mill"], name="toy")
OURS: dict[str, Any] = json.loads(document.to_json(TOY))
LIB = {
    "name": "toy",
    "duration_matrix": [[3, 2], [4, 1]],
    "machines_matrix": [[0, 1], [1, 0]],
    "metadata": {"optimum": 6},
}


@st.composite
def shops(draw: st.DrawFn) -> JobShop:
    """Shops with everything the document holds."""
    m, n = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    times = st.integers(0, 9) | st.integers(0, 2**46)
    pair = st.tuples(st.integers(0, m - 1), times)
    names = draw(st.lists(st.text(max_size=8), min_size=m, max_size=m, unique=True))
    return JobShop(
        [draw(st.lists(pair, min_size=1, max_size=6)) for _ in range(n)],
        names,
        release=draw(st.none() | st.lists(times, min_size=n, max_size=n)),
        deadline=draw(st.none() | st.lists(st.none() | times, min_size=n, max_size=n)),
        names=draw(st.none() | st.just([f"order {j}" for j in range(n)])),
        name=draw(st.text(max_size=8)),
        time_unit=draw(st.sampled_from(["ns", "us", "ms", "s"])),
        metadata=draw(st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2)),
    )


# round trips


@given(shops())
def test_round_trip(shop: JobShop) -> None:
    """What is written is read back, metadata included; the same shop gives the same bytes."""
    content = document.to_json(shop)
    read = document.from_tree(parse(content.decode(), "f"), "f")
    assert read == shop
    assert read.sha256 == shop.sha256
    assert document.to_json(read) == content


@given(shops())
def test_graph_document_is_a_job_shop(shop: JobShop) -> None:
    """The schedule document of a shop's graph is that shop again."""
    found = document.from_graph(shop.graph())
    assert found.sha256 == shop.sha256 and found.graph() == shop.graph()


def test_files(tmp_path: Path) -> None:
    """Every readable kind through a file, decided by content."""
    path = tmp_path / "x.data"
    TOY.write(path)
    assert JobShop.read(path) == TOY == read_problem(path)
    assert JobShop.read(path, format="json") == TOY
    path.write_text(json.dumps(LIB))
    assert JobShop.read(path) == JobShop(TOY.jobs, name="toy")
    assert dict(JobShop.read(path).metadata) == {"optimum": 6}


# graphs that are no job shop


def graph_with(**fields: Any) -> Schedule:
    """The toy graph with fields replaced."""
    return dataclasses.replace(TOY.graph(), **fields)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (graph_with(op_resources=[[0], [1], [1], [0, 1]]), r"operations\[3\] needs 2 resources"),
        (graph_with(arcs=Arcs.of([(0, 1, 5), (2, 3)])), "arcs"),
        (graph_with(arcs=Arcs.of([(0, 1), (2, 3), (0, 3)])), "arcs"),
        (graph_with(setup_in=[1, 0, 0, 0]), "setup_in"),
        (graph_with(release=[0, 5, 0, 0]), "release"),
        (graph_with(job=[0, 1, 0, 1]), "not sorted by jobs"),
        (
            graph_with(resources=(Resource("a", 9), Resource("b"))),
            r"resources\[0\].memory: 9, expected 0",
        ),
        (graph_with(period=99), "period"),
    ],
)
def test_other_graphs_are_refused(graph: Schedule, message: str) -> None:
    """Whatever a job shop cannot hold is named, never dropped."""
    with pytest.raises(InputError, match=rf"^the graph is not a job shop: .*{message}"):
        document.from_graph(graph)


def test_schedules_are_no_instances() -> None:
    """A scheduled document is refused as an instance."""
    scheduled = TOY.graph().with_orders([[0, 3], [2, 1]], [0, 4, 0, 4])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="this is a schedule"):
        document.from_graph(scheduled)


# hostile documents


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (changed(OURS, ["machines"], ["a", "a"]), r'machines\[1\]: "a" is also the name of machines'),
    (without(LIB, ["name"]), 'field "name" is missing'),
    (changed(LIB, ["duration_matrix", 1, 0], 4.5), r"duration_matrix\[1\]\[0\]: .*got 4.5"),
    (changed(LIB, ["duration_matrix", 1], [4]), r"machines_matrix\[1\]: expected 1 values"),
    (
        changed(LIB, ["machines_matrix", 1, 0], [1, 2]),
        r"machines_matrix: this looks like a flexible job shop \(1 operation with alternatives\)",
    ),
    (changed(LIB, ["machines_matrix", 1, 0], 10**9), r"jobs\[1\]\[0\]: machine: .*got 1000000000"),
    ({"foo": 1}, "no known keys.*readable are optsched.jobshop/1, optsched.jobarray/1"),
    ({"format": "optsched.teapot/1"}, 'format "optsched.teapot/1".*readable are'),
]


@pytest.mark.parametrize(("text", "message"), [(json.dumps(tree), said) for tree, said in HOSTILE])
def test_hostile_documents(text: str, message: str, tmp_path: Path) -> None:
    """Every bad document gets one sentence with the place in it."""
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(InputError, match=message.replace("^f", f"^{path}")) as error:
        read_problem(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{path}:")
