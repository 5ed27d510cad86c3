"""The document ``optsched.schedule/1``: what is written is what is read, in canonical bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs, periodic_schedules, schedules

from optsched import Csr, Objective, Resource, Schedule
from optsched.model.document import read, write
from optsched.model.schedule import Arcs

if TYPE_CHECKING:
    from pathlib import Path

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NAMES
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(graphs() | schedules() | periodic_schedules(), NAMES, st.dictionaries(NAMES, VALUES))
def test_round_trip(s: Schedule, name: str, provenance: dict[str, Any]) -> None:
    """read(write(s)) == s, with any name and any provenance, and the bytes do not change."""
    s = replace(s, name=name, provenance=provenance)
    data = write(s)
    again = read(data.decode())
    assert again == s
    assert write(again) == data
    assert again.kind.tolist() == s.kind.tolist()


def example() -> Schedule:
    """A schedule with a little of everything."""
    return Schedule(
        name="a",
        resources=(Resource("g", 8), Resource("h")),
        duration=[3, 4],  # type: ignore[arg-type]
        op_resources=Csr.of([[0], [0, 1]]),
        arcs=Arcs.of([(0, 1, -1)]),
        kind=["F", ""],  # type: ignore[arg-type]
        deadline=np.array([9, np.iinfo(np.int64).max]),
        sequences=Csr.of([[0, 1], [1]]),
        start=[0, 3],  # type: ignore[arg-type]
        objective=Objective("makespan", 7, 7, "optimal"),
    )


CANONICAL = b"""{
  "format": "optsched.schedule/1",
  "name": "a",
  "resources": [
    {"name":"g","memory":8},
    {"name":"h"}
  ],
  "operations": [
    {"duration":3,"kind":"F","resources":[0],"deadline":9},
    {"duration":4,"resources":[0,1]}
  ],
  "arcs": [
    [0,1,-1]
  ],
  "sequences": [
    [0,1],
    [1]
  ],
  "starts": [0,3],
  "objective": {"name":"makespan","value":7,"lower_bound":7,"status":"optimal"}
}
"""


def test_canonical_bytes() -> None:
    """These bytes are version 1 of the format."""
    assert write(example()) == CANONICAL
    assert read(CANONICAL.decode()) == example()


def test_files(tmp_path: Path) -> None:
    """The methods write and read the same document; a byte-order mark is skipped."""
    path = tmp_path / "x.schedule.json"
    example().write(path)
    assert path.read_bytes() == CANONICAL
    assert Schedule.read(path) == example()
    path.write_bytes(b"\xef\xbb\xbf" + CANONICAL)
    assert Schedule.read(path) == example()


def test_hashes_are_of_content() -> None:
    """Whitespace, key order, the name and fields at their default do not count; content does."""
    tree = json.loads(CANONICAL)
    tree["operations"][1] |= {"job": 0, "kind": "", "acquire": 0}
    tree = {key: tree[key] for key in reversed(tree)} | {"name": "b"}
    other = read(json.dumps(tree, indent=3))
    assert other.sha256 == example().sha256 == example().graph().sha256
    assert other != example() and other.same_graph(example())
    turning = [replace(example().graph(), deadline=None, period=p) for p in (9, np.int64(9))]
    assert turning[0].sha256 == turning[1].sha256 != other.sha256
    for change in ({"time_unit": "ms"}, {"resources": (Resource("g", 9), Resource("h"))}):
        assert replace(example(), **change).sha256 != other.sha256


@given(graphs(), graphs())
def test_equal_hashes_are_equal_graphs(a: Schedule, b: Schedule) -> None:
    """`same_graph` and the hash agree."""
    assert (a.sha256 == b.sha256) == a.same_graph(b)


def test_bytes_do_not_depend_on_the_identity_of_strings() -> None:
    """Equal schedules are written alike, wherever their strings came from."""
    unit, status = "".join(["u", "s"]), "".join(["unk", "nown"])
    other = replace(example(), time_unit=unit, objective=Objective("makespan", 7, None, status))
    assert write(other) == write(replace(example(), objective=Objective("makespan", 7)))
