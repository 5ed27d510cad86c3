"""The Chrome trace: exact times, kept orders, flows and counters, nothing else."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import periodic_schedules, schedules

from optsched.errors import InputError
from optsched.formats import perfetto
from optsched.model.schedule import Arcs, Csr, Resource, Schedule

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]
MICROSECONDS = {"ns": Fraction(1, 1000), "us": 1, "ms": 1000, "s": 10**6}


def events_of(s: Schedule, phase: str, cycles: int = 3) -> list[Event]:
    """Events of one phase, after a trip through strict JSON."""
    text = json.dumps(perfetto.trace(s, cycles=cycles), allow_nan=False)
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def slices(s: Schedule, cycles: int = 3) -> list[Event]:
    """Complete events of operations (setups are slices too)."""
    return [e for e in events_of(s, "X", cycles) if e["cat"] != "setup"]


def exactly(value: float, unit: str) -> int:
    """Trace time back in the schedule's unit; fails if it is no whole number of it."""
    ticks = Fraction(str(value)) / MICROSECONDS[unit]
    assert ticks.denominator == 1
    return int(ticks)


@given(schedules(), st.sampled_from(["ns", "us", "ms", "s"]), st.sampled_from([0, 10**14]))
def test_every_operation_is_there_once_per_resource(s: Schedule, unit: str, late: int) -> None:
    """Slices and instants cover start and duration exactly, in every unit, also late ones."""
    s = replace(s, time_unit=unit, start=s.start + late)
    found = defaultdict(list)
    for event in slices(s) + events_of(s, "i"):
        i = event["args"]["operation"]
        assert exactly(event["ts"], unit) == s.start[i]
        assert exactly(event.get("dur", 0), unit) == s.duration[i]
        assert (event["ph"] == "i") == (s.duration[i] == 0)
        assert event["args"]["job"] == s.job[i]
        assert event["args"]["kind"] == s.kind[i]
        found[i].append(event["tid"] - 1)
    for event in events_of(s, "b"):
        assert s.op_resources[event["args"]["operation"]].tolist() == []
        found[event["args"]["operation"]] = []
    for i in range(s.n_operations):
        held = s.op_resources[i].tolist()
        instant = [-1] if not held and not s.duration[i] else []
        assert sorted(found[i]) == (sorted(held) or instant)
    assert len(events_of(s, "b")) == len(events_of(s, "e"))


@given(schedules())
def test_order_of_the_sequences_is_kept(s: Schedule) -> None:
    """Operations of a thread come in the order of the resource."""
    by_thread = defaultdict(list)
    for event in perfetto.trace(s)["traceEvents"]:
        if event["ph"] in "Xi" and event.get("cat") != "setup" and event["tid"]:
            by_thread[event["tid"] - 1].append(event["args"]["operation"])
    for r, row in enumerate(s.sequences.to_lists()):
        assert by_thread[r] == row


@given(schedules())
def test_setups_lie_right_before_their_operation(s: Schedule) -> None:
    """One slice per positive setup, that ends where the operation starts."""
    found = sorted(
        (e["tid"] - 1, e["args"]["before"], e["ts"], e["dur"])
        for e in events_of(s, "X")
        if e["cat"] == "setup"
    )
    wanted = []
    for r, row in enumerate(s.sequences.to_lists()):
        for i, j in itertools.pairwise(row):
            if wait := s.setup(i, j):
                wanted.append((r, j, int(s.start[j]) - wait, wait))
    assert found == sorted(wanted)


@given(schedules())
def test_flows_are_the_arcs_between_resources(s: Schedule) -> None:
    """One pair per arc between different resources, bound to the slices of its ends."""
    arrows = defaultdict(dict)
    for phase in "sf":
        for event in events_of(s, phase):
            arrows[event["id"]][phase] = (event["tid"] - 1, event["ts"])
    wanted = []
    for i, j in zip(s.arcs.tail.tolist(), s.arcs.head.tolist(), strict=True):
        a, b = s.op_resources[i].tolist(), s.op_resources[j].tolist()
        if a and b and s.duration[i] and s.duration[j]:
            wanted.append((s.start[i], s.start[j], set(a), set(b)))
    pairs = [(arrow["s"], arrow["f"]) for arrow in arrows.values()]
    assert all(tail[0] != head[0] and tail[1] <= head[1] for tail, head in pairs)
    for (r, begin), (q, end) in pairs:
        assert any(begin == x and end == y and r in a and q in b for x, y, a, b in wanted)
    assert len(pairs) >= sum(not (a & b) for *_, a, b in wanted)
    assert len(pairs) <= len(wanted)


@given(schedules())
def test_counters_follow_the_memory(s: Schedule) -> None:
    """The last counter of a resource is what all its operations together leave held."""
    last: dict[str, int] = {}
    for event in events_of(s, "C"):
        last[event["name"]] = event["args"]["bytes"]
    for r, resource in enumerate(s.resources):
        left = int((s.acquire - s.free)[s.users[r]].sum())
        assert last.get(f"memory {resource.name}", 0) == left


@given(periodic_schedules(), st.integers(1, 4))
def test_periodic_traces_begin_cold(s: Schedule, cycles: int) -> None:
    """Every operation once per cycle from its offset on, a period apart; arrows within the run."""
    found = defaultdict(list)
    marks = [e for e in events_of(s, "i", cycles) if e["cat"] == "cycle"]
    assert [(e["name"], e["ts"]) for e in marks] == [
        (f"cycle {c}", c * s.period) for c in range(cycles)
    ]
    instants = [e for e in events_of(s, "i", cycles) if e["cat"] != "cycle"]
    for event in slices(s, cycles) + instants + events_of(s, "b", cycles):
        args = event["args"]
        i = args["operation"]
        assert event["ts"] == s.start[i] + args["cycle"] * s.period
        assert args.get("iteration", 0) == args["cycle"] - s.offset[i]
        found[i, event["tid"]].append(args["cycle"])
    for i in range(s.n_operations):
        for r in s.op_resources[i].tolist() or [-1]:
            assert sorted(found[i, r + 1]) == list(range(int(s.offset[i]), cycles))
    tokens = s.arcs.distance + s.offset[s.arcs.head] - s.offset[s.arcs.tail]
    spans = set((s.start[s.arcs.head] - s.start[s.arcs.tail] + tokens * s.period).tolist())
    heads = {event["id"]: event["ts"] for event in events_of(s, "f", cycles)}
    tails = {event["id"]: event["ts"] for event in events_of(s, "s", cycles)}
    assert heads.keys() == tails.keys()
    assert {heads[arrow] - tails[arrow] for arrow in heads} <= spans


def test_names_and_file(tmp_path: Path) -> None:
    """Names pass through as data; the file is the same bytes every time and plain ASCII."""
    hostile = '</script>"\\ $x$'
    s = Schedule(
        name=hostile,
        resources=(Resource(hostile), Resource("b")),
        duration=np.array([2, 3]),
        op_resources=Csr.of([[0], [1]]),
        arcs=Arcs.of([(0, 1)]),
        sequences=Csr.of([[0], [1]]),
        start=np.array([0, 2]),
    )
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    perfetto.write(s, one)
    perfetto.write(s, two)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes().isascii()
    names = {event["args"].get("name") for event in events_of(s, "M")} - {None}
    assert names == {hostile, "b"}


def test_graphs_are_refused(tmp_path: Path) -> None:
    """Without starts there is nothing to trace, and no file appears."""
    s = Schedule(resources=(), duration=np.array([1]), op_resources=Csr.of([[]]))
    with pytest.raises(InputError, match="not scheduled"):
        perfetto.write(s, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())
