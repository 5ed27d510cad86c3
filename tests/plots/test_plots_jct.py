"""Pictures of simulations: the same bytes every time, every policy, all GPUs that are in use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import depth

from optsched import plots
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.synthetic import synthetic
from optsched.errors import InputError
from optsched.plots.simulation import simulation_report, used_share

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.cluster.results.run import Run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Two policies on one workload."""
    jobs = synthetic(80, 1.2, 2, gpus=16)
    return {name: simulate(jobs, name, Nodes(2, gpus=8)) for name in ("fifo", "sjf")}


def test_every_policy_is_drawn(runs: dict[str, Run], tmp_path: Path) -> None:
    """A line of completion times and of GPUs in use, and two bars, per policy."""
    simulation_report(runs, tmp_path / "x.svg")
    ids = set(
        re.findall(r'id="((?:cdf|used)-[0-9]+|queueing|service)"', (tmp_path / "x.svg").read_text())
    )
    assert {"cdf-0", "cdf-1", "used-0", "used-1"} <= {*ids}


@pytest.mark.slow
def test_the_same_bytes(runs: dict[str, Run], tmp_path: Path) -> None:
    """Every kind of file, twice."""
    for suffix in ("html", "svg", "png", "pdf")[: depth(2, 4)]:
        for k in (1, 2):
            simulation_report(runs, tmp_path / f"{k}.{suffix}", title="<b>&")
        one = (tmp_path / f"1.{suffix}").read_bytes()
        assert one == (tmp_path / f"2.{suffix}").read_bytes()
    page = (tmp_path / "1.html").read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert not re.search(r"(src|href)=.https?:", page)


def test_used_share(runs: dict[str, Run]) -> None:
    """Its mean over the whole time is the utilization."""
    run = runs["fifo"]
    edges = np.linspace(int(run.workload.submit[0]), int(run.log.end.max()), 37)
    assert used_share(run, edges).mean() == pytest.approx(run.metrics.utilisation)


def test_what_cannot_be_drawn(runs: dict[str, Run], tmp_path: Path) -> None:
    """No run, another suffix: one sentence and no file."""
    with pytest.raises(InputError, match="at least one"):
        simulation_report({}, tmp_path / "x.png")
    with pytest.raises(InputError, match=r"x.gif: expected a file ending in .png"):
        simulation_report(runs, tmp_path / "x.gif")
    with pytest.raises(AttributeError, match="no attribute"):
        plots.histogram  # noqa: B018
    assert not list(tmp_path.iterdir())
