"""The published ArrayPipe documents: what becomes a job array, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hostile_documents import changed

from optsched.errors import InputError
from optsched.formats import arraypipe

TINY: dict[str, Any] = {
    "name": "tiny",
    "source": "made up",
    "header_jobs": 2,
    "header_machines": 2,
    "n_jobs": 2,
    "n_stages": 2,
    "jobs": [
        {"route": [0, 1, 1, 0], "dur": [1, 2, 3, 4]},
        {"route": [0, 1, 1, 0], "dur": [5, 6, 7, 8]},
    ],
    "fb_pipeline": True,
    "flags": [],
    "distinct_jobs": 2,
}


@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_chain_of_the_graph_is_the_published_one(
    data: st.DataObject, stages: int, jobs: int
) -> None:
    """Every job's operations, followed along the arcs, have the devices and times of the file."""
    route = [*range(stages), *reversed(range(stages))]
    times = st.lists(st.integers(0, 99), min_size=2 * stages, max_size=2 * stages)
    rows = [{"route": route, "dur": data.draw(times)} for _ in range(jobs)]
    tree = {"name": "x", "n_stages": stages, "jobs": rows}
    graph = arraypipe.from_tree(tree, "x").graph()
    follow = dict(zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True))
    firsts = set(range(graph.n_operations)) - set(follow.values())
    assert len(firsts) == jobs
    for i in firsts:
        chain = [i]
        while chain[-1] in follow:
            chain.append(follow[chain[-1]])
        assert [int(graph.single_resource[o]) for o in chain] == route
        assert [int(graph.duration[o]) for o in chain] == rows[int(graph.job[i])]["dur"]


HOSTILE: list[tuple[list[Any], Any, str]] = [
    (["n_jobs"], 3, "n_jobs: 3, but there are 2 jobs"),
    (["n_stages"], 3, r"jobs\[0\].route: expected 6 values .*got 4"),
    (["n_stages"], 10**15, r"jobs\[0\].route: expected 2000000000000000 values"),
    (["jobs", 1, "dur"], [1, 2, 3], r"jobs\[1\].dur: expected 4 values .*got 3"),
    (["jobs", 1, "route"], [0, 1, 0, 1], r"jobs\[1\].route\[2\]: expected device 1 .*0$"),
    (["jobs", 0, "memory"], [1], r'jobs\[0\]: unknown field "memory"'),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_hostile_documents(path: list[Any], value: Any, message: str) -> None:
    """Every bad document gets one sentence with the path in it."""
    with pytest.raises(InputError, match=message) as error:
        arraypipe.from_tree(changed(TINY, path, value), "f")
    assert str(error.value).startswith("f: ")
    assert "\n" not in str(error.value)
