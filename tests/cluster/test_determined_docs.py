"""The documents and the example that docs/determined.md shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optsched.cluster.determined import Task, document

ROOT = Path(__file__).parents[2]


def test_documents_are_read() -> None:
    """The one in the page, and those of the instances."""
    page = (ROOT / "docs/determined.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    pools, _ = document.from_tree(json.loads(text), "page")
    assert pools[0].decide().release == ("old",)
    for path in (ROOT / "instances/determined").glob("*.json"):
        pools, _ = document.from_tree(json.loads(path.read_text()), str(path))
        assert pools[0].decide()


def test_the_example_prints_both_walks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of both variants."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import determined_walks

    determined_walks.main()
    out = capsys.readouterr().out
    assert out.count("running {'eight': 8}") == 2 and "variant docs" in out


def test_the_example_does_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks that displace each other are told after some rounds."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from determined_walks import Cluster

    cluster = Cluster("code")
    tasks = (Task("a", 8, position=2), Task("b", 8, submitted=1))
    cluster.state = replace(cluster.state, tasks=tasks)
    with pytest.raises(RuntimeError, match="two: not settled after 100 rounds"):
        cluster.settle("two")
