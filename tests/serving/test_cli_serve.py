"""`optsched serve-...` as users call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from program import Cli


@pytest.fixture
def site(cli: Cli) -> Cli:
    """A folder with a scenario and its plan."""
    ran = cli("serve-make", "-o", "s.json", "--rate", "500", "--seconds", "0.2", "--seed", "1")
    assert ran.code == 0 and "requests" in ran.out, ran.err
    ran = cli("serve-plan", "s.json", "-o", "p.json")
    assert ran.code == 0 and "optimal" in ran.out, ran.err
    return cli


def test_simulate_check_and_verify(site: Cli) -> None:
    """A log that is right, a schedule that verifies, a wrong log is refused."""
    ran = site("serve-sim", "s.json", "--plan", "p.json", "--log", "l.json",
               "--schedule", "x.schedule.json")  # fmt: skip
    assert ran.code == 0 and "p99_ms" in ran.out, ran.err
    assert site("serve-check", "s.json", "l.json").code == 0
    assert site("verify", "x.schedule.json").code == 0
    tree = json.loads(Path("l.json").read_text())
    tree["batches"][0]["end_ms"] -= 0.5
    Path("l.json").write_text(json.dumps(tree))
    ran = site("serve-check", "s.json", "l.json")
    assert ran.code == 1 and "batch 0" in ran.out and "violations" in ran.out


def test_a_router_of_the_current_folder(site: Cli) -> None:
    """It is loaded as module:Class; a class without a method `route` is refused."""
    Path("narrow_router.py").write_text(
        "from optsched.serving import Decision\n"
        "class Narrow:\n    def route(self, view):\n        return Decision(0, 0, 4)\n"
        "class Empty: pass\n"
    )
    ran = site("serve-sim", "s.json", "--router", "narrow_router:Narrow", "--plan", "cold")
    assert ran.code == 0 and "accuracy          70.3" in ran.out, ran.err
    ran = site("serve-sim", "s.json", "--router", "narrow_router:Empty")
    assert ran.code == 2 and "has no method route(view)" in ran.err


def test_routers_side_by_side(site: Cli) -> None:
    """A file of points, and their front as a picture."""
    ran = site("serve-bench", "-o", "b.json", "--loads", "400x2,500", "--seeds", "2", "--seconds",
               "0.2", "--routers", "marginal", "--routers", "static:0,1,2,3/jsed/4")  # fmt: skip
    assert ran.code == 0, ran.err
    points = json.loads(Path("b.json").read_text())["points"]
    assert [one["load"] for one in points] == ["400x2", "400x2", "500", "500"]
    assert [one["router"] for one in points] == ["marginal", "static:0,1,2,3/jsed/4"] * 2
    for option, name in (("-o", "f.png"), ("--html", "f.html")):
        assert site("plot", "b.json", "--pareto", "accuracy,p99_ms", option, name).code == 0
        assert Path(name).stat().st_size > 1000


def test_profile(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of accuracies is looked at before the measuring; then a scenario is written."""
    pytest.importorskip("torch")
    from optsched.serving import profiler
    from optsched.serving.network import SlimResNet
    from optsched.serving.scenario import Scenario, Server
    from optsched.serving.training import save_network

    net = SlimResNet(10, (8, 16), blocks=1, in_channels=1, group_channels=4, widths=(0.5, 1.0))
    save_network(net, "net.pt")
    Path("a.json").write_text('{"0,0": 70.0, "0,1": 72.5, "1,0": 73.0}')
    words = ("serve-profile", "--network", "net.pt", "--accuracy", "a.json", "-o", "s.json",
             "--seconds", "1")  # fmt: skip
    ran = cli(*words)
    assert ran.code == 2 and "accuracy: 1 of 4 tuples are missing" in ran.err
    table = {"0,0": 70.0, "0,1": 72.5, "1,0": 73.0, "1,1": 75.0}
    Path("a.json").write_text(json.dumps(table))
    devices = [profiler.DeviceCosts(Server(s, 100, 0.5, 0.01, 5, 20, 1.0), None, []) for s in "xy"]
    work = [[[1.0, 2.0]], [[1.0, 2.0], [2.0, 4.0]]]
    costs = profiler.Costs(8, net.widths, work, [[1, 2], [3, 4]], devices)
    monkeypatch.setattr(profiler, "profile", lambda *_, **__: costs)  # minutes on real devices
    ran = cli(*words)
    assert ran.code == 0 and "wrote s.json" in ran.out, ran.err
    assert Scenario.read("s.json").accuracy.tolist() == [*table.values()]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve-sim", "s.json", "--router", "best"), "router: expected marginal"),
        (("serve-sim", "s.json", "--router", "static:0,1/jsed/8"), "widths: expected 4 indices"),
        (("serve-sim", "s.json", "--router", "marginal", "--plan", "s.json"), "format"),
        (("serve-sim", "s.json", "--router", "policy:none.npz"), "none.npz"),
        (("serve-sim", "p.json"), "format"),
        (("serve-sim", "s.json", "--log", "s.json"), "s.json"),
        (("serve-make", "-o", "x.json", "--name", "cluster"), "name: expected one of"),
        (("serve-make", "-o", "x.json", "--rate", "nan"), "rate"),
        (("serve-make", "-o", "x.json", "--burst", "0.5"), "burst: expected"),
        (("serve-bench", "-o", "x.json", "--loads", "500,200x"), "loads: expected RATE"),
        (("serve-bench", "-o", "p.json", "--plan", "p.json", "--loads", "200"), "p.json"),
        (("serve-bench", "-o", "x.json", "--loads", "1", "--seconds", "0"), "without requests"),
        (("serve-sim", "s.json", "--router", "fluid:1/jsed/8"), "router: expected marginal"),
        (("serve-plan", "s.json", "-o", "x.json", "--headroom", "0"), "headroom"),
        (("solve", "s.json"), "simulated, not solved: `optsched serve-sim s.json`"),
        (("serve-sim", "s.json", "--router", "none:None"), "router: 'none:None' cannot be loaded"),
    ],
)
def test_bad_input(site: Cli, words: tuple[str, ...], says: str) -> None:
    """Exit code 2, the field and the value, no file."""
    ran = site(*words)
    assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err, ran.err
    assert not Path("x.json").exists()
