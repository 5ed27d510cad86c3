"""The Gantt chart: one bar per operation, the same bytes every time, no trap in a name."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import depth, few_examples
from hypothesis import given
from hypothesis import strategies as st
from rolling_arrays import equal_jobs
from strategies import periodic_schedules, schedules, spoilt

from optsched import plots
from optsched.analysis.occupancy import bars, setups
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.synthetic import synthetic
from optsched.errors import InputError
from optsched.model.schedule import Csr, Resource, Schedule
from optsched.plots import gantt
from optsched.plots.simulation import simulation_report, used_share

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.cluster.results.run import Run

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: Path, group: str) -> int:
    """Shapes in the groups whose id begins like this."""
    count = 0
    for element in ET.parse(picture).iter(f"{SVG}g"):
        if element.get("id", "").startswith(group):
            definitions = {p for d in element.iter(f"{SVG}defs") for p in d.iter(f"{SVG}path")}
            uses = len(list(element.iter(f"{SVG}use")))
            count += uses or sum(p not in definitions for p in element.iter(f"{SVG}path"))
    return count


def pipeline(name: str = "two jobs") -> Schedule:
    """Two jobs through two devices, with setups, every kind of ours and a foreign one."""
    return Schedule(
        name=name,
        resources=(Resource(name, 20), Resource("gpu1")),
        duration=np.array([3, 3, 6, 6, 3, 3, 6, 6, 0]),
        op_resources=Csr.of([[0], [1], [1], [0], [0], [1], [1], [0], []]),
        job=np.array([0, 0, 0, 0, 1, 1, 1, 1, 1]),
        kind=np.array(["F", "R", "B", "U", "F", "I", "W", name[:16], "end"]),
        family=np.array([0, 0, 0, 0, 1, 1, 1, 1, 1]),
        setup_out=np.full(9, 2),
        acquire=np.array([5, 0, 0, 0, 5, 0, 0, 0, 0]),
        sequences=Csr.of([[0, 4, 3, 7], [1, 2, 5, 6]]),
        start=np.array([0, 3, 6, 12, 5, 14, 17, 23, 29]),
    )


@few_examples
@given(st.one_of(schedules(), periodic_schedules()))
def test_one_bar_per_operation_and_resource(tmp_path: Path, s: Schedule) -> None:
    """Bars, marks and setups of the picture are those of the schedule."""
    picture = tmp_path / "x.svg"
    gantt(s, picture, cycles=2)
    chart = bars(s, 2)
    lasting = int((chart.end > chart.start).sum())
    assert drawn(picture, "bars-") == lasting
    assert drawn(picture, "marks") == len(chart.start) - lasting
    assert drawn(picture, "setups") == len(setups(s, 2).start)


def words(picture: Path) -> list[str]:
    """All texts of an SVG picture (matplotlib keeps them as comments)."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text(encoding="utf-8"))


def test_cycles_are_told_apart(tmp_path: Path) -> None:
    """A line and a number where every cycle begins; numbers thin out where there is no room."""
    s, picture = equal_jobs(3, 4), tmp_path / "x.svg"
    for cycles in (1, 3, 100):
        gantt(s, picture, cycles=cycles)
        ids = {e.get("id", "") for e in ET.parse(picture).iter(f"{SVG}g")}
        assert sum(name.startswith("cycle-") for name in ids) == cycles - 1
        shown = [text for text in words(picture) if text.strip().startswith("cycle ")]
        assert shown[0].strip() == "cycle 0"
        assert len(shown) == cycles if cycles < 10 else 5 < len(shown) < 40
    for cycles in (0, 101, 10**9):
        with pytest.raises(InputError, match=rf"cycles: expected 1..100, got {cycles}"):
            gantt(s, tmp_path / "y.png", cycles=cycles)
    assert not (tmp_path / "y.png").exists()


def test_what_a_cold_start_leaves_out_is_hollow(tmp_path: Path) -> None:
    """Bars of an iteration before the first have no colour; the legend says so."""
    s = equal_jobs(3, 4, 2, 3)
    figure = gantt(s, tmp_path / "x.svg", cycles=2)
    groups = [c for c in figure.axes[0].collections if str(c.get_gid()).startswith("bars-")]
    hollow = [c for c in groups if len(c.get_facecolor()) == 1]
    chart = bars(s, 2)
    late = int((chart.cycle < s.offset[chart.operation]).sum())
    assert sum(len(c.get_paths()) for c in hollow) == late > 0
    assert "not run by a cold start" in words(tmp_path / "x.svg")
    flat = replace(s.unroll(2))
    gantt(flat, tmp_path / "y.svg")
    assert "not run by a cold start" not in words(tmp_path / "y.svg")
    assert drawn(tmp_path / "y.svg", "bars-") == flat.n_operations


@few_examples
@given(spoilt(st.one_of(schedules(), periodic_schedules())))
def test_wrong_schedules_are_still_drawn(tmp_path: Path, s: Schedule) -> None:
    """The picture shows what the document says, right or wrong."""
    gantt(s, tmp_path / "x.svg", cycles=1)
    assert ET.parse(tmp_path / "x.svg").getroot().tag == f"{SVG}svg"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_same_bytes_every_time(tmp_path: Path, suffix: str) -> None:
    """No date, no version, no random id, whatever the user's matplotlib settings."""
    import matplotlib

    gantt(pipeline(), tmp_path / f"one{suffix}")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.hashsalt": "other"}):
        gantt(pipeline(), tmp_path / f"two{suffix}")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "$\\frac{$ \\x",
        "<script>&\"'",
        "a\x00b\x1b\n",
        "漢字 🎉",
    ],
)
@pytest.mark.filterwarnings("error")
def test_names_cannot_break_the_picture(tmp_path: Path, name: str) -> None:
    """Formulas, markup, control characters and foreign scripts are just text.

    Old versions of matplotlib warn of a letter that the font lacks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        gantt(pipeline(name), tmp_path / "x.svg")
    root = ET.parse(tmp_path / "x.svg").getroot()
    assert not [element for element in root.iter() if str(element.tag).endswith("script")]
    assert drawn(tmp_path / "x.svg", "bars-") == 8


def test_legal_suffixes_are_named(tmp_path: Path) -> None:
    """Any other suffix is refused in one sentence, before anything is drawn."""
    for name in ("x.html", "x", "x.jpg"):
        with pytest.raises(InputError, match=re.escape(".png, .svg, .pdf")):
            gantt(pipeline(), tmp_path / name)
    with pytest.raises(InputError, match="not scheduled"):
        gantt(pipeline().graph(), tmp_path / "x.png")
    with pytest.raises(InputError, match="cannot be written"):
        gantt(pipeline(), tmp_path / "missing" / "x.svg")
    assert not list(tmp_path.iterdir())


# pictures of simulations: the same bytes every time, every policy, all GPUs that are in use


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
