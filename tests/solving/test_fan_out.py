"""Sweeps by several engines: the same bytes, failures by cell, ends with Ctrl-C and the parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from program import PATIENCE, Cli, start

from optsched.errors import InputError, OptschedError
from optsched.solving.fan_out import Engine, Outcome, fan_out

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICIES = """
import os, time
from pathlib import Path

class Broken:
    name = "broken"
    clairvoyant = False
    def decide(self, view):
        raise RuntimeError("no idea")

class Endless(Broken):
    name = "endless"
    def decide(self, view):
        Path("pid.new").write_text(str(os.getpid()))
        os.rename("pid.new", "pid")
        time.sleep(600)
"""
SWEEP = ("cluster", "simulate", "synthetic:200:1", "--nodes", "2x8", "--policy")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Cli]:
    """A folder with policies that misbehave, from which workers can import."""
    monkeypatch.chdir(tmp_path)
    Path("misfits.py").write_text(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield Cli(tmp_path, monkeypatch, capsys)
    sys.modules.pop("misfits", None)


def inverse(value: int) -> float:
    """1 / value, with three kinds of errors."""
    if value == 5:
        raise InputError("value: 5 is not allowed")
    if value == 6:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "not to be pickled as it is")
    return 1 / value


def by_index(engine: Engine | None = None) -> list[tuple[int, float | None, type, str]]:
    """Outcomes in the order of arguments, errors as type and text."""
    found: list[Outcome[float]] = sorted(
        fan_out(inverse, range(9), engine), key=lambda o: o.position
    )
    return [(o.position, o.value, type(o.error), str(o.error or "")) for o in found]


def test_outcomes_are_those_of_one_process() -> None:
    """Values and errors by argument; errors keep their kind; wrong engines are refused."""
    found = by_index()
    assert [row[0] for row in found] == [*range(9)] and found[2][1] == 0.5
    assert found[0][2:] == (OptschedError, "ZeroDivisionError: division by zero")
    assert found[5][2:] == (InputError, "value: 5 is not allowed")
    assert found[6][3].startswith("UnicodeDecodeError: 'utf-8'")
    assert by_index(Engine("loky", 2)) == found
    for wrong, message in [
        (Engine("spark"), "engine: expected one of loky, dask, ray"),
        (Engine("loky", 0), "jobs: expected an integer"),
    ]:
        with pytest.raises(InputError, match=message):
            next(fan_out(inverse, [1], wrong))


def test_an_address_that_is_none_is_refused() -> None:
    """The variable and its value are named."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    refused = pytest.raises(InputError, match="DASK_SCHEDULER_ADDRESS: 'nowhere': ")
    with dask.config.set({"scheduler-address": "nowhere"}), refused:
        next(fan_out(inverse, [1], Engine("dask", 1)))


def fatal(value: int) -> int:
    """End the process for 1."""
    if value == 1:
        os._exit(1)
    return value


@pytest.mark.slow
def test_a_cell_that_kills_workers_of_dask_is_named() -> None:
    """Its outcome is an error; the others have values."""
    pytest.importorskip("distributed")
    found = {o.position: o for o in fan_out(fatal, range(4), Engine("dask", 2))}
    assert {i: o.value for i, o in found.items()} == {0: 0, 1: None, 2: 2, 3: 3}
    assert type(found[1].error) is OptschedError and "workers died" in str(found[1].error)


@pytest.mark.slow
def test_dask_cluster_gives_the_same_bytes(site: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations by the processes of a cluster, found by its address."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    sweep = (
        *SWEEP,
        "fifo,srtf",
        "--seeds",
        "2",
        "--estimate-error",
        "1",
        "--failures",
        "604800:3600",
    )
    assert site(*sweep, "--metrics", "one.json").code == 0
    settings: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "processes": True}
    with distributed.LocalCluster(**settings, dashboard_address=":0") as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        with dask.config.set({"scheduler-address": cluster.scheduler_address}):
            given = ("--engine", "dask", "--jobs", "2")
            assert site(*sweep, "--metrics", "two.json", *given).code == 0
            assert by_index(Engine("dask")) == by_index()
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()
    runs = json.loads(Path("one.json").read_bytes())["runs"]
    assert list(runs) == ["fifo seed 0", "srtf seed 0", "fifo seed 1", "srtf seed 1"]
    assert "submit" in runs["srtf seed 1"]["jobs"] and "submit" not in runs["srtf seed 0"]["jobs"]


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_failed_cell_is_named_and_others_are_kept(site: Cli, jobs: str) -> None:
    """The metrics of the others are written; the error names the policy."""
    names = "misfits:Broken,fifo"
    ran = site(*SWEEP, names, "--metrics", "m.json", "--jobs", jobs)
    assert ran.code in (1, 2) and "misfits:Broken: " in ran.err and "no idea" in ran.err
    assert [*json.loads(Path("m.json").read_bytes())["runs"]] == ["fifo"]
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_workers_end_with_the_command(site: Cli, number: signal.Signals) -> None:
    """Also if it is killed; Ctrl-C keeps the complete simulations."""
    process = start(*SWEEP, "fifo,misfits:Endless", "--jobs", "2", "--metrics", "m.json")
    until = time.monotonic() + PATIENCE
    while not Path("pid").exists() and process.poll() is None:
        time.sleep(0.05)
    worker = int(Path("pid").read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in err
        assert "of 2 simulations are done" in err
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
