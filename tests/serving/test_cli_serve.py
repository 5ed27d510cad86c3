"""`optsched slim` as users call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from program import Cli


@pytest.fixture
def site(cli: Cli) -> Cli:
    """A folder with a scenario and its plan."""
    ran = cli("slim", "make", "-o", "s.json", "--rate", "500", "--seconds", "0.2", "--seed", "1")
    assert ran.code == 0 and "requests" in ran.out, ran.err
    ran = cli("slim", "plan", "s.json", "-o", "p.json")
    assert ran.code == 0 and "optimal" in ran.out, ran.err
    return cli


def test_simulate_check_and_verify(site: Cli) -> None:
    """A log that is right, a schedule that verifies, a wrong log is refused."""
    ran = site("slim", "simulate", "s.json", "--plan", "p.json", "--log", "l.json",
               "--schedule", "x.schedule.json")  # fmt: skip
    assert ran.code == 0 and "p99_ms" in ran.out, ran.err
    assert site("slim", "check", "s.json", "l.json").code == 0
    plan = json.loads(site("slim", "plan", "s.json", "--json").out)
    assert plan["status"] == "optimal" and any(plan["instances"].values())
    as_json = json.loads(site("slim", "simulate", "s.json", "--plan", "p.json", "--json").out)
    assert site("verify", "x.schedule.json").code == 0
    tree = json.loads(Path("l.json").read_text())
    assert as_json.items() >= tree["summary"].items()
    tree["batches"][0]["end_ms"] -= 0.5
    Path("l.json").write_text(json.dumps(tree))
    ran = site("slim", "check", "s.json", "l.json", "--json")
    assert ran.code == 1 and "batch 0" in str(json.loads(ran.out)["violations"])


def test_a_router_of_the_current_folder(site: Cli) -> None:
    """It is loaded as module:Class; a class without a method `route` is refused."""
    Path("narrow_router.py").write_text(
        "from optsched.serving import Decision\n"
        "class Narrow:\n    def route(self, view):\n        return Decision(0, 0, 4)\n"
        "class Empty: pass\n"
    )
    ran = site("slim", "simulate", "s.json", "--router", "narrow_router:Narrow", "--plan", "cold")
    assert ran.code == 0 and "accuracy          70.3" in ran.out, ran.err
    ran = site("slim", "simulate", "s.json", "--router", "narrow_router:Empty")
    assert ran.code == 2 and "has no method route(view)" in ran.err


def test_routers_side_by_side(site: Cli) -> None:
    """A file of points, and their front as a picture."""
    ran = site("slim", "bench", "-o", "b.json", "--loads", "400x2,500", "--seeds", "2",
               "--seconds", "0.2", "--routers", "marginal", "--routers",
               "static:0,1,2,3/jsed/4", "--plot", "f.html")  # fmt: skip
    assert ran.code == 0, ran.err
    points = json.loads(Path("b.json").read_text())["points"]
    assert [one["load"] for one in points] == ["400x2", "400x2", "500", "500"]
    assert [one["router"] for one in points] == ["marginal", "static:0,1,2,3/jsed/4"] * 2
    assert Path("f.html").stat().st_size > 1000


BAD_INPUT: list[tuple[tuple[Any, ...], str]] = [
    (("serve", "--router", "marginal", "--port", "99999"), "router: expected only with --slim"),
    (("slim", "simulate", "s.json", "--router", "best"), "router: expected marginal"),
    (("slim", "simulate", "s.json", "--router", "static:0,1/jsed/8"), "widths: expected 4 indices"),
    (("slim", "simulate", "s.json", "--router", "policy:none.npz"), "none.npz"),
    (("slim", "simulate", "s.json", "--log", "s.json"), "s.json"),
    (("slim", "make", "-o", "x.json", "--name", "cluster"), "name: expected one of"),
    (("slim", "make", "-o", "x.json", "--rate", "nan"), "rate"),
    (("slim", "bench", "-o", "x.json", "--loads", "500,200x"), "loads: expected RATE"),
    (("solve", "s.json"), "`optsched slim simulate s.json` reads it"),
    (
        ("slim", "simulate", "s.json", "--router", "none:None"),
        "router: 'none:None' cannot be loaded",
    ),
]


def test_bad_input(site: Cli) -> None:
    """Exit code 2, the field and the value, no file."""
    for words, says in BAD_INPUT:
        ran = site(*words)
        assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err, ran.err
        assert not Path("x.json").exists()
