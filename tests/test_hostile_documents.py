"""Whatever a file holds: an instance, or one sentence with the place. Never another exception."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, JobArray, JobShop, Schedule
from optsched.formats import taillard
from optsched.formats.read_problem import read_problem
from optsched.model.document import read, write
from optsched.problems.jobarray import document as jobarray_json
from optsched.problems.jobshop import document as jobshop_document
from optsched.problems.jobshop import generator

if TYPE_CHECKING:
    from pathlib import Path

BIG = 2**53

SCHEDULE: dict[str, Any] = {
    "format": "optsched.schedule/1",
    "name": "s",
    "time_unit": "us",
    "resources": [{"name": "g0", "memory": 9}, {"name": "g1"}],
    "operations": [
        {"duration": 3, "job": 0, "kind": "F", "stage": 0, "microbatch": 0, "iteration": 0,
         "family": 1, "resources": [0], "release": 1, "deadline": 90, "setup_in": 1,
         "setup_out": 1, "acquire": 4, "workspace": 2},
        {"duration": 4, "resources": [0, 1], "free": 4},
        {"duration": 0, "resources": []},
    ],
    "arcs": [[0, 1, 2], [1, 2]],
    "sequences": [[0, 1], [1]],
    "starts": [1, 6, 10],
    "objective": {"name": "makespan", "value": 10, "lower_bound": 9, "status": "feasible"},
    "provenance": {"solver": "x", "seed": 0},
}  # fmt: skip
JOB_SHOP: dict[str, Any] = {
    "format": "optsched.jobshop/1",
    "name": "j",
    "time_unit": "s",
    "machines": ["a", "b"],
    "jobs": [
        {"operations": [[0, 3], [1, 2]], "release": 1, "deadline": 40},
        {"operations": [[1, 4]]},
    ],
    "metadata": {"optimum": 7},
}
JOB_ARRAY: dict[str, Any] = {
    "format": "optsched.jobarray/1",
    "name": "a",
    "time_unit": "us",
    "devices": [{"name": "d0", "memory": 90, "server": "s"}, {"name": "d1", "server": "s"}],
    "place": [0, 1],
    "jobs": [
        {"name": "x", "micro_batches": 2, "multiplicity": 1, "release": 1, "forward": [1, 2],
         "backward": [3, 4], "weight": [1, 1], "recompute": [1, 1], "update": [1, 1],
         "switch": [2, 2], "lag_forward": [1], "lag_backward": [-1], "activation": [4, 4],
         "checkpoint": [2, 2], "recompute_workspace": [2, 2], "weight_memory": [1, 1],
         "state": [7, 7]},
        {"name": "y", "forward": [1, 2], "backward": [3, 4], "weight": [1, 1]},
    ],
    "options": {"objective": "makespan", "recompute_mode": [True, False],
                "recompute_as_block": True, "update_mode": "block",
                "update_blocks_gradient": False, "microbatch_order": "fixed",
                "trailing_switch": True},
}  # fmt: skip
DOCUMENTS = {"schedule": SCHEDULE, "jobshop": JOB_SHOP, "jobarray": JOB_ARRAY}
FOREIGN: dict[str, Any] = {
    "job_shop_lib": {"name": "x", "duration_matrix": [[1, 2], [3, 4]],
                     "machines_matrix": [[0, 1], [1, 0]], "metadata": {"optimum": 3}},
    "arraypipe": {"name": "x", "n_stages": 2, "n_jobs": 1, "flags": ["a"],
                  "jobs": [{"route": [0, 1, 1, 0], "dur": [1, 2, 3, 4]}]},
}  # fmt: skip
STANDARD = "# toy\n2 3\n0 3 1 2 2 2\n1 4 2 1 0 4\n"
HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 3, 2.0, 0.5, BIG + 1, 2**64, 10**400, "", "3", "x" * 1000, "\0",
    "é\u2028", [], [None], [1, "x"], {}, {"x": 1}, [[BIG, BIG, BIG, BIG]],
]  # fmt: skip


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree, the root included."""
    found = [path]
    if isinstance(tree, dict | list):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += paths(child, (*path, key))
    return found


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with the value at a path replaced."""
    if not path:
        return value
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    """A copy without the member at a path."""
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return tree


def take(path: Path, content: str | bytes) -> Any:
    """Read a file as every command does: an instance and its graph, or an `InputError`.

    What is accepted must be whole: it has a graph and a bound, and survives a round trip.
    """
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = read_problem(path)
    graph = problem.graph()
    if graph.period is None and getattr(problem, "objective_name", "makespan") == "makespan":
        assert problem.lower_bound() >= 0
        problem.infeasibility()
    assert read(write(graph).decode()) == graph
    if isinstance(problem, JobArray):
        assert jobarray_json.read(jobarray_json.write(problem).decode()) == problem
    if isinstance(problem, JobShop):
        tree = json.loads(jobshop_document.to_json(problem))
        assert jobshop_document.from_tree(tree, "x") == problem
    return problem


def outcome(path: Path, content: str | bytes) -> str:
    """The one sentence of a refusal, or ``""``."""
    try:
        take(path, content)
    except InputError as error:
        message = str(error)
        assert message.isprintable(), message
        assert not re.search(r"Expected|Object |Invalid|`|\$\.", message), message  # of msgspec
        assert len(message) < len(str(path)) + 400
        return message
    return ""


def refusal(path: Path, content: str | bytes) -> str:
    """The one sentence of a document that must be refused; it starts with the file."""
    message = outcome(path, content)
    assert message.startswith(f"{path}:"), message
    return message.removeprefix(f"{path}").removeprefix(": ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file to write to."""
    return tmp_path / "x.json"


@pytest.mark.parametrize("kind", [*DOCUMENTS, *FOREIGN])
def test_every_field_with_every_wrong_value(path: Path, kind: str) -> None:
    """Each place of a document replaced by each of many values, and each member left out."""
    document = {**DOCUMENTS, **FOREIGN}[kind]
    assert outcome(path, json.dumps(document)) == ""
    refused = 0
    for place in paths(document):
        for value in HOSTILE:
            refused += outcome(path, json.dumps(changed(document, place, value))) != ""
        if place:
            outcome(path, json.dumps(without(document, place)))
    assert refused > len(paths(document)) * len(HOSTILE) // 2


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_unknown_fields_everywhere(path: Path, kind: str) -> None:
    """An unknown member of any object (but the free-form ones) is refused by name."""
    document = DOCUMENTS[kind]
    for place in paths(document):
        node = document
        for key in place:
            node = node[key]
        if isinstance(node, dict) and place not in (("provenance",), ("metadata",)):
            bad = changed(document, (*place, "durations"), 1)
            assert 'unknown field "durations"' in refusal(path, json.dumps(bad))


@pytest.mark.parametrize("kind", [*DOCUMENTS, "standard", "taillard"])
def test_truncated_at_every_byte(path: Path, kind: str) -> None:
    """No prefix of a document is an instance, apart from white space and digits at the end."""
    texts = {key: json.dumps(tree, indent=1) for key, tree in DOCUMENTS.items()}
    texts["standard"] = STANDARD
    texts["taillard"] = taillard.to_text(generator.generate(3, 3, 5, 6))
    text = texts[kind].rstrip()
    last = len(text.rstrip("0123456789"))  # of a text only the last number may shrink
    for end in range(last if kind in ("standard", "taillard") else len(text)):
        refusal(path, text[:end])


SPOILT: list[tuple[str, Any, str]] = [
    ("schedule", {("operations", 0, "duration"): -3},
     "operations[0].duration: expected an integer >= 0, got -3"),
    ("schedule", {("operations", 0, "kind"): "F" * 10**6},
     "operations[0].kind: longer than 16 characters"),
    ("schedule", {("arcs",): [[0]]}, "arcs[0]: expected 2 to 4 integers, got 1"),
    ("schedule", {("provenance", "seed"): BIG + 1},
     "provenance.seed: expected an integer in -2^53..2^53"),
    ("schedule", {("period",): 0}, "period: expected an integer in 1..2^53, got 0"),
    ("schedule", {("format",): "optsched.schedule/2"}, "is newer than this optsched reads"),
    ("jobshop", {("format",): "other/1"}, "not an instance this optsched reads"),
    ("jobshop", {("jobs", 1, "operations"): [[2, 4]]},
     "jobs[1][0]: machine: expected an integer in 0..1, got 2 (machines are 0-based here)"),
    ("jobshop", {("jobs", 1, "operations"): [[0, BIG]]}, "jobs: durations and the latest release"),
    ("jobshop", {("metadata", "optimum"): 10**30}, "metadata.optimum: expected an integer in"),
    ("jobarray", {("jobs",): []}, "jobs: expected a list of length >= 1, got a list"),
    ("jobarray", {("jobs", 1, "forward"): [1]}, "jobs[1].forward: expected 2 values, got 1"),
    ("jobarray", {("jobs", 0, "micro_batches"): 10**9},
     "jobs[0].micro_batches: all blocks of a cycle may be at most 2000000, got 2000000002"),
    ("jobarray", {("jobs", 0, "multiplicity"): BIG, ("jobs", 1, "multiplicity"): BIG},
     "forward, backward, ...: times add up to"),
    ("jobarray", {("devices",): []}, "place: device 1 does not exist (there are 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), SPOILT, ids=[m[:50] for _, _, m in SPOILT])
def test_spoilt(path: Path, kind: str, changes: dict[tuple[Any, ...], Any], message: str) -> None:
    """The sentence names the place, the rule and the value."""
    document = DOCUMENTS[kind]
    for place, value in changes.items():
        document = changed(document, place, value)
    assert message in refusal(path, json.dumps(document))


RAW: list[tuple[str, bytes, str]] = [
    ("empty", b"", ":1: expected a job shop, got nothing (the file is empty)"),
    ("zeros", bytes(1000), ":1: expected two numbers (jobs machines), a title line"),
    ("latin-1", '{"name": "é"}'.encode("latin-1"), ":1: not a text file in UTF-8 (byte 10"),
    ("object", b"{}", "not an instance this optsched reads (no known keys)"),
    ("5000 digits, text", b"2 " + b"9" * 5000, ":1: expected an integer in 0..2^53, got a number"),
    ("deep", b'{"a":' * 100_000, "nested too deeply"),
    ("twice", b'{"format": "optsched.schedule/1", "format": 2}', 'key "format" appears twice'),
    ("many jobs", b"9007199254740992 1\n0 1\n", ":2: expected 9007199254740992 rows of"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), [r[1:] for r in RAW], ids=[r[0] for r in RAW])
def test_raw_content(path: Path, content: bytes, message: str) -> None:
    """Files that are no documents at all."""
    assert message in refusal(path, content)


@pytest.mark.parametrize("start", [b"", b'{"a": "', b"2 2\n"])
def test_megabytes_of_garbage(path: Path, start: bytes) -> None:
    """10 MB of noise give one short sentence."""
    noise = random.Random(len(start)).randbytes(10_000_000)
    refusal(path, start + noise)
    refusal(path, start + bytes(b & 0x7F for b in noise[:1_000_000]))
    refusal(path, start + b"A" * 10_000_000)


def test_sequences_of_a_schedule_are_the_verifiers_business(path: Path) -> None:
    """Orders that miss, double or misplace operations are read; `verify` lists what is wrong."""
    from optsched import verify

    for row in ([[0], [1]], [[0, 1, 1], [1]], [[0, 1, 2], [1]], [[1, 0], [1]], [[], []]):
        path.write_text(json.dumps(changed(SCHEDULE, ("sequences",), row)))
        assert verify(Schedule.read(path))


@given(st.sampled_from(list(DOCUMENTS)), st.integers(0, 10**6), st.binary(max_size=6))
def test_fuzzed_bytes(kind: str, at: int, noise: bytes) -> None:
    """Bytes of a document overwritten."""
    data = json.dumps(DOCUMENTS[kind]).encode()
    at %= len(data)
    _read_or_refuse((data[:at] + noise + data[at + len(noise) :]).decode("latin-1"))


@given(st.text("0123456789 -\n#.eax\t", max_size=60))
def test_fuzzed_text(text: str) -> None:
    """Anything that looks a little like a job shop."""
    from optsched.formats.registry import Source
    from optsched.formats.standard import from_text, layout

    for reader in (
        lambda: layout(Source("f", text)),
        lambda: from_text(text, "f").graph(),
        lambda: from_text(text, "f", reentrant=True).graph(),
        lambda: taillard.from_text(text, "f").graph(),
    ):
        try:
            reader()
        except InputError as error:
            assert str(error).startswith("f:") and str(error).isprintable()


def _read_or_refuse(text: str) -> None:
    from optsched.formats.read_problem import from_tree
    from optsched.io.strict_json import parse

    try:
        tree = parse(text, "f")
        from_tree(tree, "f").graph()
        if isinstance(tree, dict) and tree.get("format") == SCHEDULE["format"]:
            s = read(text, "f")
            assert read(write(s).decode()) == s
    except InputError as error:
        assert str(error).startswith("f:") and str(error).isprintable()
