"""Policies made of one function by the decorator `compiled`."""

from __future__ import annotations

import pickle

import numba
import numpy as np
import pytest
from depth import depth
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds
from rigid_workloads import workload

from optsched.cluster import Choice, Nodes, PolicyError, Stalled, compiled, simulate
from optsched.cluster.policies import get
from optsched.cluster.world.compiled import _loop
from optsched.errors import InputError


@compiled
def longest(view):
    """Whoever has waited longest, at its largest size."""
    quota = view.gpus.copy()
    room = view.free.sum()
    for i in range(len(quota)):
        largest = view.size[view.size_ptr[i + 1] - 1]
        if not view.running[i] and largest <= room:
            quota[i] = largest
            room -= largest
    return quota


@compiled(clairvoyant=True)
def greedy(view):
    """Least of everything that there is to see; preempts where it may and somebody else runs."""
    quota = view.gpus.copy()
    key = view.remaining + view.done + view.attained + view.passes + view.submit + view.priority
    key = key - view.group + np.rint(view.weight).astype(np.int64) + view.job + view.draining
    room = view.free.sum()
    for i in np.argsort(key, kind="mergesort"):
        size = view.size[view.size_ptr[i]]
        if not view.running[i] and size <= room and view.rate[view.size_ptr[i]] > 0:
            quota[i] = size
            room -= size
        elif i > 0 and view.running[0] and view.running[i] and view.preemptible[i]:
            quota[i] = 0 if view.at_pass_end[i] and view.time % 5 == 4 else quota[i]
    return quota if view.capacity.sum() > 0 else view.gpus


def test_it_is_a_policy():
    """With a name and without options; it may be sent to other processes."""
    assert (longest.name, longest.clairvoyant, longest.options) == ("longest", False, ())
    assert (greedy.name, greedy.clairvoyant) == ("greedy", True)
    check_policy(longest, worlds=policy_worlds(depth(4, 20)))
    assert pickle.loads(pickle.dumps(longest)) is longest


def test_what_is_wrong_is_said():
    """In the function, in its answer, or in what it leads to."""
    jobs, nodes = workload([0, 1], [4, 8], [5, 5]), Nodes(1)

    @compiled
    def all_at_once(view):
        return view.size.copy()

    @compiled
    def short(view):
        return view.gpus[1:].copy()

    @compiled
    def never(view):
        return view.gpus.copy()

    @compiled
    def unknown(view):
        return view.nothing

    with pytest.raises(PolicyError, match=r"all_at_once\W+at time 1: job .*over-allocation"):
        simulate(jobs, all_at_once, nodes)
    with pytest.raises(PolicyError, match="expected 1 numbers"):
        simulate(jobs, short, nodes)
    with pytest.raises(Stalled, match="starts none"):
        simulate(jobs, never, nodes, engine="generic")
    with pytest.raises(InputError, match=r"unknown: numba cannot compile it: .*nothing.*line \d+"):
        simulate(jobs, unknown, nodes)
    with pytest.raises(InputError, match="expected a function"):
        compiled(3)


@pytest.mark.parametrize("engine", ["auto", "generic"])
def test_what_breaks_inside_is_said(engine):
    """An exception names its place; floats are refused, not cut, however the policy runs."""
    jobs, nodes = workload([0, 1], [4, 8], [5, 5]), Nodes(1)

    @compiled
    def raises(view):
        if len(view.gpus) > 0:
            raise ValueError("no")
        return view.gpus

    @compiled
    def halves(view):
        return view.size + 0.5

    with pytest.raises(
        PolicyError, match=r"raises\W+at time 0: decide\(\) raised ValueError: no"
    ) as info:
        simulate(jobs, raises, nodes, engine=engine)
    assert "test_compiled_function.py" in str(info.value)
    with pytest.raises(PolicyError, match="quota: expected a row of integers"):
        simulate(jobs, halves, nodes, engine=engine)


def _of_floats(view):
    return Choice(view.gpus.copy(), np.arange(len(view.gpus)) * 1.0)


def _of_tuple(view):
    return Choice(view.gpus.copy(), (1, 0))


def _late(view):
    return Choice(view.gpus.copy(), (), view.time + 1.5)


def _plain(view):
    return view.gpus.copy(), np.arange(len(view.gpus))


def _gap(view):
    return Choice(view.gpus.copy(), wake_at=view.time + 1)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (_of_floats, "order: expected a row of integers, got one of float64"),
        (_of_tuple, "order: expected a row of integers"),
        (_late, "wake_at: expected a time"),
        (_plain, "quota: expected a row of integers"),
        (_gap, "give Choice all values before the last one"),
    ],
)
def test_compiled_choices_are_not_read_wrongly(rule, message):
    """An order of another kind was left out or cut in silence, where Python takes or refuses it."""
    with pytest.raises(InputError, match=message):
        simulate(workload([0, 1], [4, 8], [5, 5]), compiled(rule), Nodes(1))


@pytest.mark.parametrize("name", ["named_policies:first_fit", "named_policies:Limited"])
def test_by_module_and_name(name):
    """A rule function, or a class with options; what is not there is refused."""
    jobs = workload([0, 0, 1], [2, 8, 5], [5, 5, 9])
    policy = get(name)
    logs = [simulate(jobs, policy, Nodes(1), engine=e).log for e in ("auto", "generic")]
    assert all(np.array_equal(a, b) for a, b in zip(*logs, strict=True) if a is not None)
    with pytest.raises(InputError, match="cannot be loaded"):
        get("named_policies:Nothing")
    with pytest.raises(InputError, match=r"without folder and \.py"):
        get("named_policies.py:Limited")
    with pytest.raises(InputError, match="no method `decide`"):
        get("math:pi")


def test_a_module_that_breaks_is_told(tmp_path, monkeypatch):
    """Whatever goes wrong in the module of the caller ends in one sentence."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_at_once.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "needs_more.py").write_text("class Needs:\n    def __init__(self, x): ...\n")
    with pytest.raises(InputError, match="cannot be loaded: RuntimeError: no"):
        get("breaks_at_once:X")
    with pytest.raises(InputError, match=r"cannot be made: .*missing 1 required"):
        get("needs_more:Needs")
    (tmp_path / "wrong_options.py").write_text(
        "class P:\n    name, clairvoyant, options = 'p', False, ('k',)\n"
        "    def __init__(self, k=1):\n        if k != 1:\n            raise ValueError('k is 1')\n"
        "    def decide(self, view): ...\n"
        "class Q(P):\n    options = 5\n"
        "class R(P):\n    def __init__(self, k=1): raise SystemExit(1)\nmade = P()\n"
    )
    for name, message in (
        ("P:k=2", "cannot be made: ValueError: k is 1"), ("Q:k=1", "a tuple of names.*got 5"),
        ("R:k=1", "cannot be made: SystemExit"), ("made:k=1", "options: .*no class"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            get(f"wrong_options:{name}")
    assert get("wrong_options:P:k=1").name == "wrong_options:P:k=1"


def test_rules_with_other_arguments_keep_their_machine_code():
    """A rule that changes replaces its file on disk; one with other arguments has another one."""
    files = {_loop(_gap, numba.typeof(given))[1]._cache.prefix for given in ((1,), (1.0,))}
    assert len(files) == 2
