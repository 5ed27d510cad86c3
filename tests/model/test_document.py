"""The document ``optsched.schedule/1``: what is written is what is read, in canonical bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs, periodic_schedules, schedules

from optsched import InputError, Objective, Resource, Rows, Schedule
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


@given(schedules())
def test_fields_at_their_default_are_left_out(s: Schedule) -> None:
    """No operation has a field that is zero, empty or without deadline; no null anywhere."""
    tree = json.loads(write(s))
    for operation in tree["operations"]:
        rest = {
            key: value for key, value in operation.items() if key not in ("duration", "deadline")
        }
        assert all(value not in (0, "", [], None) for value in rest.values())
        assert operation.get("deadline", 0) is not None
    assert None not in tree.values()
    assert all(arc[-1] != 0 or len(arc) == 2 for arc in tree.get("arcs", []))
    assert {"starts", "sequences", "objective"}.isdisjoint(json.loads(write(s.graph())))


def example() -> Schedule:
    """A schedule with a little of everything."""
    return Schedule(
        name="a",
        resources=(Resource("g", 8), Resource("h")),
        duration=[3, 4],  # type: ignore[arg-type]
        op_resources=Rows.of([[0], [0, 1]]),
        arcs=Arcs.of([(0, 1, -1)]),
        kind=["F", ""],  # type: ignore[arg-type]
        deadline=np.array([9, np.iinfo(np.int64).max]),
        sequences=Rows.of([[0, 1], [1]]),
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
    """These bytes are the format: hashes of instances in the world depend on them."""
    assert write(example()) == CANONICAL
    assert read(CANONICAL.decode()) == example()


def test_order_of_members_does_not_matter() -> None:
    """Members of objects may come in any order, with any white space."""
    tree = json.loads(CANONICAL)
    turned = {key: tree[key] for key in reversed(tree)}
    turned["operations"] = [dict(reversed(op.items())) for op in tree["operations"]]
    assert read(json.dumps(turned, indent=3)) == example()


def test_objective_of_an_instance() -> None:
    """A claim may come without orders, and a bound without a value."""
    s = replace(example().graph(), objective=Objective("makespan", None, 5, "unknown"))
    assert read(write(s).decode()) == s


def test_empty_document() -> None:
    """No operations and no resources are a graph too."""
    s = Schedule(resources=(), duration=[], op_resources=Rows.of([]))  # type: ignore[arg-type]
    assert read(write(s).decode()) == s
    assert s.with_orders(Rows.of([]), []).makespan == 0


def test_files(tmp_path: Path) -> None:
    """The methods write and read the same document; a byte-order mark is skipped."""
    path = tmp_path / "x.schedule.json"
    example().write(path)
    assert path.read_bytes() == CANONICAL
    assert Schedule.read(path) == example()
    path.write_bytes(b"\xef\xbb\xbf" + CANONICAL)
    assert Schedule.read(path) == example()


def test_errors_name_the_file(tmp_path: Path) -> None:
    """Errors of syntax, of types and of the graph all start with the file."""
    path = tmp_path / "bad.json"
    for text in ("{", CANONICAL.decode().replace("3,", '"3",', 1), CANONICAL.decode() + "x"):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            Schedule.read(path)
        assert str(caught.value).startswith(f"{path}:")
    path.write_text(CANONICAL.decode().replace("[0,1,-1]", "[0,1,-4]"))
    with pytest.raises(InputError, match=r"bad\.json: arcs\[0\]: lag -4 is outside -3\.\.2\^53"):
        Schedule.read(path)


@pytest.mark.slow
def test_large_document() -> None:
    """128,000 operations in a ring of chains come back the same."""
    n, width = 128_000, 64
    ids = np.arange(n)
    tail = ids[:-width]
    zeros = np.zeros(len(tail), np.int64)
    s = Schedule(
        resources=tuple(Resource(f"gpu{r}", 2**40) for r in range(width)),
        duration=ids % 97,
        op_resources=Rows(np.arange(n + 1), ids % width),
        arcs=Arcs(tail, tail + width, zeros, zeros),
        kind=np.where(ids % 2 == 0, "F", "B"),
        job=ids // 1000,
        acquire=ids % 5,
        free=ids % 5,
        sequences=Rows(np.arange(width + 1) * (n // width), ids.reshape(-1, width).T.ravel()),
        start=ids,
    )
    assert read(write(s).decode()) == s


def test_bytes_do_not_depend_on_the_identity_of_strings() -> None:
    """Equal schedules are written alike, wherever their strings came from."""
    unit, status = "".join(["u", "s"]), "".join(["unk", "nown"])
    plain = Schedule(
        resources=(Resource("a"),), duration=[1], op_resources=Rows.of([[0]]), time_unit="us"
    )
    other = replace(plain, time_unit=unit)
    assert write(other) == write(plain) and other.sha256 == plain.sha256
    claims = [
        plain.with_orders(Rows.of([[0]]), [0], Objective("makespan", 1, None, word))
        for word in ("unknown", status)
    ]
    assert write(claims[0]) == write(claims[1])
