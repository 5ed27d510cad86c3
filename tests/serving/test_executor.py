"""Real requests on real processes, and the controller under a clock of ours."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_cases import children

import optsched
from optsched.errors import InputError
from optsched.io.strict_json import parse
from optsched.io.values import frozen
from optsched.serving import core
from optsched.serving.log import Log
from optsched.serving.log_check import check
from optsched.serving.plan import Plan
from optsched.serving.routers import (
    JSED,
    Backlog,
    Decision,
    InfeasibleRoute,
    MarginalCost,
    PowerOfTwo,
    RandomWidth,
    RoundRobin,
    Router,
    Static,
)
from optsched.serving.scenario import Scenario, Settings
from optsched.serving.tables import Server
from optsched.serving.world import ARRIVE, REQUEUE, ROUTE

torch = pytest.importorskip("torch")

from optsched.serving import executor, server_process  # noqa: E402
from optsched.serving.executor import (  # noqa: E402
    Batch,
    Controller,
    Executor,
    RequestsLost,
)
from optsched.serving.network import SlimResNet  # noqa: E402

MIXED = Router(RandomWidth(), RoundRobin(), 4)
HALF = Plan.of([(0, 0, 1), (0, 0, 0), (0, 1, 1)])  # the other server loads what it needs


def tiny(classes: int = 3, channels: Any = (4, 8), widths: Any = (0.5, 1.0)) -> SlimResNet:
    """One block a segment."""
    return SlimResNet(classes, channels, 1, 1, 2, widths)


NET = tiny()


def scene(n: int, every_ms: float = 10.0) -> Scenario:
    """Requests for two servers."""
    return Scenario(
        NET.widths, NET.mmac(8), [[10, 20], [10, 20]], [[70.0, 72.0], [71.0, 75.0]],
        [Server(name, 60, 1.0, 1.0, 0, 0, 5.0) for name in ("a", "b")], np.arange(n) * every_ms,
        max_batch=8,
    )  # fmt: skip


def direct(scenario: Scenario, run: Any, images: Any) -> Any:
    """The scores of the whole network under the widths that the requests were given."""
    with torch.inference_mode():
        rows = scenario.tuples[run.tuples].tolist()
        return torch.cat([NET(images[r : r + 1], row) for r, row in enumerate(rows)])


class Own:
    """A router in Python: the server that is alive and has less to do, any width."""

    def route(self, view: Any) -> Decision:
        """Decide."""
        work = np.where(view.feasible[:, view.segment, 0], view.queued, np.inf)
        return Decision(int(work.argmin()), len(view.head) % 2, 3)


def drive(
    scenario: Scenario, router: Any, plan: Plan | None, seed: int, dies: float
) -> tuple[Controller, int]:
    """Serve with random durations; a server may die. The controller, and the requests lost."""
    rng = np.random.default_rng(seed)
    controller, dead = Controller(scenario, router, plan, Settings(idle_ms=20.0), seed), -1
    coming = [(at, ARRIVE, 0, r) for r, at in enumerate(scenario.arrival.tolist())]
    follows = {core.RUN: core.DONE, core.LOAD: core.LOADED, core.UNLOAD: core.UNLOADED}
    lost = 0

    def feed(event: int, s: int, which: int, now: int) -> None:
        for kind, to, slot, until in controller.feed(event, s, which, now):
            at = until if kind == core.WAKE else now + int(rng.integers(1, 6_000_000))
            heapq.heappush(coming, (at, follows.get(kind, core.TICK), to, slot))

    while coming:
        now, event, s, which = heapq.heappop(coming)
        if now > dies and dead < 0:
            dead = seed % 2
            for r, segment in controller.lose(dead, now):
                feed(REQUEUE, segment, r, now)
                lost += 1
        if event == ARRIVE or s != dead:
            feed(event, s, which, now)
        while controller.waiting:
            feed(ROUTE, 0, 0, now)
    return controller, lost


ROUTERS = [MIXED, MarginalCost(group=4), Router(Static((0, 1)), JSED()),
           Router(Backlog(), PowerOfTwo(), 2), Own()]  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS, ids=["random", "marginal", "static", "backlog", "own"])
def test_any_durations(router: Any) -> None:
    """With and without plans, deaths, deadlines: logs are legal, requests are completed or shed."""
    lost = shed = 0
    for seed in range(8):
        plan = HALF if seed % 2 else None
        scenario = scene(60, 1.0).replace(deadline_ms=8 if seed in (2, 3, 6, 7) else None)
        controller, n = drive(scenario, router, plan, seed, 20e6 if seed >= 4 else np.inf)
        log, _ = controller.log(None, {})
        assert check(log.scenario, log) == [], f"seed {seed}"
        assert log.summary.completed + log.summary.shed == 60, f"seed {seed}"
        lost += n
        shed += log.summary.shed
    assert lost and shed


def test_launches_follow_slow_batches() -> None:
    """Up to four times the scenario's; fall while requests are shed, faster while all is idle."""
    controller, _ = drive(scene(60, 1.0), MIXED, HALF, 0, np.inf)
    launch, state = controller.world.core.server["launch"], controller.world
    before, least = launch.copy(), controller.scenario.launch
    assert (least < before).all() and (before <= 4 * least).all()
    state.request["next"][:40] = range(-1, 39)
    state.trace["shed"] = 39
    controller._use(state._replace(deadline=frozen(np.full(60, 10**9))))
    controller.batches[0, 0] = Batch(0, 0, 0, np.arange(40, 41))
    assert controller.shed() == list(range(39, -1, -1))
    assert (least < launch).all() and (launch < before).all()
    controller.batches.clear()
    for _ in range(40):  # sparse requests, each shed alone
        controller.world.trace["shed"] = 0
        assert controller.shed() == [0]
    assert (launch < 1.02 * least).all()


def test_admission_follows_wasted_work() -> None:
    """Stricter by requests shed after a segment, less so by those answered or while all is idle."""
    scenario = scene(60, 1.0).replace(deadline_ms=[None] * 20 + [40.0] * 40)
    controller = Controller(scenario, MIXED, HALF)
    state, every = controller.world, np.arange(60)

    def found(requests: Any, wrong: float) -> int:
        controller._admit(requests, np.full(len(requests), wrong))
        return int(state.trace["router"][0])

    controller.batches[0, 0] = Batch(0, 0, 0, every[20:21])
    assert found(every[:20], 1.0) == scenario.router  # without deadlines
    assert found(every[20:], 1.0) == scenario.router + 40 * 40_000_000 // 4096
    assert found(every[20:30], -1.0) == scenario.router + 30 * 40_000_000 // 4096
    controller.batches[0, 0] = Batch(0, 0, 0, every[:1])  # work without deadlines never ends
    for _ in range(100):
        before = int(state.trace["router"][0])
        assert found(every[:20], 1.0) < before or before == scenario.router
    assert before == scenario.router
    controller.batches[0, 0] = Batch(0, 0, 0, every[20:21])
    state.trace["sheds"] = 0  # nothing to refuse: only widths would follow
    assert found(every[20:], 1.0) == scenario.router


def test_a_dead_server_is_no_place() -> None:
    """What can run nowhere any more is refused."""
    controller = Controller(scene(4), Router(Static((0, 0)), RoundRobin()))
    assert controller.lose(0, 1) == controller.lose(1, 1) == []
    controller.feed(ARRIVE, 0, 0, 2)
    with pytest.raises(InfeasibleRoute, match="server 'a' can never run segment 0"):
        controller.feed(ROUTE, 0, 0, 2)


# processes


def test_scores_are_those_of_the_whole_network() -> None:
    """Loads and widths at random, maybe mixed in a batch; the log is legal."""
    scenario = scene(60, 4.0)
    images = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 3
    run = Executor(NET, scenario, MIXED, HALF).run(images)
    assert check(scenario, run.log) == []
    assert (run.summary.completed, run.summary.energy_j) == (60, None)
    expected = direct(scenario, run, images)
    torch.testing.assert_close(run.outputs, expected, atol=1e-4, rtol=0)
    again = Log.read(parse(run.log.to_json().decode(), "log"), scenario)
    assert again.wall_clock and again.summary == run.summary
    assert optsched.verify(run.schedule) == []
    right = 100 * int((expected.argmax(1) == labels).sum()) / 60  # of outputs, not of the table
    assert run.accuracy(labels) == pytest.approx(right)
    with pytest.raises(InputError, match=r"labels: expected 60 integers, one a request"):
        run.accuracy(labels[1:])
    hurried = scenario.replace(deadline_ms=[0.0, 60_000.0] * 30)
    run = Executor(NET, hurried, MIXED, HALF).run(images)
    assert check(hurried, run.log) == []
    assert (run.summary.shed, run.summary.attainment) == (30, 50.0)
    assert run.outputs[::2].isnan().all() and run.outputs[1::2].isfinite().all()


def test_command_measures_accuracy(cli: Any, tmp_path: Path) -> None:
    """A network of zeros answers 0 for every image; networks of other images are refused."""
    pytest.importorskip("sklearn")
    from optsched.serving.network import digits, save_network

    net = tiny(10)
    for weight in net.parameters():
        weight.data.zero_()
    save_network(net, tmp_path / "zero.pt")
    save_network(SlimResNet(10, (4, 8), 1, 3, 2, (0.5, 1.0)), tmp_path / "colour.pt")
    scene(12).replace(mmac=net.mmac(8)).write(tmp_path / "s.json")
    zeros = float((digits("test").y[:12] == 0).double().mean())
    done = cli("slim", "run", "s.json", "--network", "zero.pt", "--compare")
    assert done.code == 0
    row = next(line.split() for line in done.out.splitlines() if "accuracy" in line)
    assert float(row[2]) == pytest.approx(100 * zeros, abs=0.01) != float(row[1])
    words = ("slim", "run", "s.json", "--network")
    said = cli.refused(*words, "colour.pt")
    assert "takes images of 3 channels, these have 1" in said


def test_death_and_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is killed, then Ctrl-C: all that arrived is served, and nothing is left behind."""
    before, memory, calls = children(), {*os.listdir("/dev/shm")}, itertools.count()

    def act(_done: int, _of: int) -> None:
        call = next(calls)
        if call == 2:
            os.kill((children() - before).pop(), signal.SIGKILL)
        if call == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(executor, "_POLL", 0.03)
    run = Executor(NET, scene(4000, 2.0), MIXED).run(torch.randn(4000, 1, 8, 8), act)
    arrived = int((run.finish >= 0).sum())
    assert len(run.log.provenance["died"]) == 1
    assert 0 < run.summary.completed == arrived < 4000
    assert check(run.scenario, run.log) == []
    assert run.outputs[:arrived].isfinite().all()
    assert run.outputs[arrived:].isnan().all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (children(), {*os.listdir("/dev/shm")}) == (before, memory)


@pytest.mark.slow
def test_nobody_is_left() -> None:
    """All servers are killed: the error names requests, and has the history so far."""
    before = children()

    def kill(done: int, _of: int) -> None:
        for pid in children() - before if done else ():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RequestsLost, match=r"died \('[ab]', '[ab]'\), no server is left") as caught:
        Executor(NET, scene(200), MIXED).run(torch.randn(200, 1, 8, 8), kill)
    assert 0 < caught.value.run.summary.completed < 200
    assert check(caught.value.run.scenario, caught.value.run.log) == []


_PARENT = """
from test_executor import *
tell = lambda *_: print(*children(), flush=True)
Executor(NET, scene(5000), MIXED).run(torch.randn(5000, 1, 8, 8), tell)
"""


@pytest.mark.slow
def test_orphans_end() -> None:
    """The servers of a parent that is killed end too."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        parent.kill()
    assert len(pids) == 2
    until = time.monotonic() + 30
    while (
        left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    ) and until > time.monotonic():
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize(
    ("net", "fields", "images", "message"),
    [
        (NET, {"devices": ["cpu"]}, 0, "devices: 1 for 2 servers"),
        (NET, {"devices": ["cpu", "tpu"]}, 0, r"devices\[1\].*'tpu'"),
        (NET, {"router": 7}, 0, "router: expected"),
        (NET, {"plan": Plan.of([(5, 0, 0)])}, 0, "plan: server"),
        (tiny(channels=(4,)), {}, 0, "net: 1 segments"),
        (tiny(classes=9), {}, torch.zeros(2, 1, 8, 8), "another net"),
        (NET, {}, torch.zeros(2, 1, 9, 9), r"MMAC for images of shape \(1, 9, 9\)"),
        (NET, {}, torch.zeros(2, 1, 8, 8).int(), "int32"),
    ],
)  # fmt: skip
def test_bad_input(
    net: Any, fields: Any, images: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a process is started."""
    monkeypatch.setattr(server_process.subprocess, "Popen", None)
    with pytest.raises(InputError, match=message):
        Executor(**{"net": net, "scenario": scene(2), **fields}).run(images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_serve_on_a_gpu() -> None:
    """Streams of one device: scores are those of the whole network."""
    scenario, images = scene(40), torch.randn(40, 1, 8, 8)
    run = Executor(NET, scenario, MIXED, HALF, devices=["cuda:0"] * 2).run(images)
    assert check(scenario, run.log) == []
    torch.testing.assert_close(run.outputs, direct(scenario, run, images), atol=1e-4, rtol=1e-4)
