"""Measure the costs of a network on this machine and make a scenario of them."""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.serving.plan import plan_instances
from optsched.serving.scenario import Scenario
from optsched.serving.tables import SLOTS, Server
from optsched.serving.workload import arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.model.schedule import IntArray
    from optsched.serving.network import Segmented
    from optsched.serving.server_process import Servers
    from optsched.serving.tables import FloatArray

_WARM: Final = 2  # warm-up rounds
_LONG: Final = 120  # seconds after which three rounds are enough
_TRIAL: Final = 8000  # requests of the trial, in at most 20 s


class Costs(NamedTuple):
    """Costs of a network on this machine, with the fields of `Scenario`.

    Examples
    --------
    >>> from optsched import serving
    >>> server = serving.Server("cpu", 64, launch_ms=0.5, ms_per_mmac=1, idle_w=0, peak_w=0)
    >>> costs = serving.Costs(8, [0.5, 1], [[[1, 2]]], [[5, 10]], [server])
    >>> costs.scenario({"0": 60, "1": 70}, rate=50, seconds=0.1)
    Scenario('', 7 requests, 1 servers, 1 segments, widths (0.5, 1.0))
    """

    max_batch: int
    widths: Sequence[float]
    mmac: list[list[list[float]]]
    vram_mb: list[list[float]]
    servers: list[Server]
    router_ms: float = 0.0
    error: float | None = None
    """Relative error of the simulated mean latency of a trial, before it was used."""

    def scenario(
        self,
        accuracy: Mapping[str, float] | Any,
        *,
        rate: float = 60.0,
        burst: float = 1.0,
        seconds: float = 20.0,
        seed: int = 0,
        **fields: Any,
    ) -> Scenario:
        """Make a scenario of requests for this machine; its servers take no power.

        Parameters
        ----------
        accuracy, rate, burst, seconds, seed
            See `measure_accuracy` and `arrivals`.
        fields
            Other fields of `Scenario`.
        """
        given = {key: value for key, value in self._asdict().items() if key != "error"} | {
            "accuracy": accuracy,
            "arrival_ms": arrivals(rate, burst=burst, seconds=seconds, seed=seed),
        }
        return Scenario(**{**given, **fields})


def profile(
    net: Segmented,
    devices: Sequence[str] = ("cpu", "cpu"),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    side: int = 32,
    shape: Sequence[int] | None = None,
    accuracy: Mapping[str, float] | Any = None,
    repeats: int = 20,
    seed: int = 0,
    on_progress: Callable[[int, int], object] | None = None,
) -> Costs:
    """Measure every segment, input width, width and batch on every server, and fit its costs.

    The servers are those of `Executor`, all busy; times are measured in the parent process and
    include messages. Instances have all widths; the largest batches are measured several at a time,
    for `Server.parallel`. At last, two trials serve requests at 60 % of the capacity: `launch_ms`
    is corrected until the simulated mean latency is the measured one.

    Parameters
    ----------
    net, devices
        Any weights; see `Segmented` and `Servers`.
    batches
        Sizes; the largest becomes the scenario's `max_batch`.
    side, shape
        Pixels of the side of an image for a `SlimResNet`; the shape of an image for others.
    accuracy
        For the choice of widths in the trials, see `Costs.scenario`; None: wider ones are better.
    repeats, seed
        Rounds in random orders, of which medians are taken; fewer, but three, after two minutes.
    on_progress
        Called with the numbers of completed and of all rounds.

    Examples
    --------
    >>> costs = serving.profile(net, ["cpu", "cpu"], batches=(1, 4, 16), side=16)  # doctest: +SKIP
    """
    from optsched.serving.network import work_of
    from optsched.serving.server_process import Servers

    if shape is None:
        shape = (getattr(net, "in_channels", 1), integer("side", side, 1, 2**16), side)
    sizes = sorted({integer("batches", n, 1, 4096) for n in batches})
    if not sizes:
        raise InputError("batches: expected at least one size, got none")
    rng = np.random.default_rng(integer("seed", seed, 0, 2**31 - 1))
    rounds = _WARM + integer("repeats", repeats, 1, 10_000)
    work = work_of(net, shape)
    mmac = np.array([part * len(net.widths) if len(part) == 1 else part for part in work])
    k, w, _ = mmac.shape
    if not len(devices) or k > SLOTS:
        raise InputError(f"devices, net: {len(devices)} devices, {k} segments (at most {SLOTS})")
    each = SLOTS // k  # instances of a segment
    cases = [(j, i, v, n, m) for j in range(k) for i in range(w if j else 1) for v in range(w)
             for n in sizes for m in range(1, each + 1)
             if m == 1 or (v, n) == (w - 1, sizes[-1])]  # fmt: skip
    with Servers(net, devices, shape, sizes[-1]) as servers:
        servers.memory.normal_()
        loads = [
            servers.run([(s, j * each + m, ("load", j, v)) for s in range(len(devices))])
            for v in range(w) for j in range(k) for m in range(each)
        ]  # fmt: skip
        ms = _rounds(servers, cases, rounds, rng, on_progress)
        held_by = getattr(net, "sliced", lambda j, _: net.segments[j])
        size = [[sum(p.nbytes for p in held_by(j, v).parameters()) + servers.memory.nbytes
                 for v in range(w)] for j in range(k)]  # fmt: skip
    vram_mb = (np.array(size) / 1e6).round(3)
    capacity = SLOTS * float(vram_mb.max())
    found = []
    for s, (device, _) in enumerate(servers.places):
        one = Server(f"{device}-{s}", capacity, 0, 0, 0, 0, float(np.median(loads, axis=0)[s]))
        found.append(fit(one, np.array(cases), np.median(ms[_WARM:, s], axis=0), mmac))
    costs = Costs(sizes[-1], net.widths, mmac.tolist(), vram_mb.tolist(), found)
    for _ in range(2):  # the second trial is at the load that the first has found
        costs = _corrected(net, costs, devices, shape, accuracy)
    return costs


def _rounds(
    servers: Servers,
    cases: Sequence[tuple[int, ...]],
    rounds: int,
    rng: np.random.Generator,
    on_progress: Callable[[int, int], object] | None,
) -> FloatArray:
    """Measure all cases on all servers at once, [round][server][case], each in random orders."""
    every, each = range(len(servers.places)), SLOTS // (1 + max(case[0] for case in cases))
    ms, begin = np.zeros((rounds, len(every), len(cases))), monotonic()
    for done, row in enumerate(ms, 1):
        for step in zip(*[rng.permutation(len(cases)).tolist() for _ in every], strict=True):
            tasks = []
            for s, c in enumerate(step):
                j, i, v, n, m = cases[c]
                task = ("run", j, v, [(i, list(range(n)))])
                tasks += [(s, j * each + slot, task) for slot in range(m)]
            times = np.array(servers.run(tasks))
            to = np.array(tasks, object)[:, 0]
            row[every, step] = [times[to == s].max() for s in every]
            sleep(times.max() / 1e3)  # idle time between batches, as in use
        if on_progress is not None:
            on_progress(done, rounds)
        if done >= _WARM + 3 and monotonic() - begin > _LONG:
            break
    return ms[:done]


def _corrected(
    net: Segmented, costs: Costs, devices: Sequence[str], shape: Sequence[int], accuracy: Any
) -> Costs:
    """Fit `launch_ms` to the busy time of a trial, then `router_ms` to its mean latency."""
    import torch

    from optsched.serving.executor import Executor
    from optsched.serving.live import LiveServer
    from optsched.serving.simulator import simulate

    k, w = np.shape(costs.vram_mb)
    alone = [k * one.launch_ms + np.sum(one.cost_ms, 0)[-1, -1] for one in costs.servers]
    rate = 600 * sum((one.parallel or 1) / ms for one, ms in zip(costs.servers, alone, strict=True))
    table = np.indices((w,) * k).sum(axis=0) if accuracy is None else accuracy
    seconds = max(min(20, _TRIAL / rate), 20 / rate)  # about 20 requests at least
    given = costs.scenario(table, rate=rate, seconds=seconds)
    plan, first = plan_instances(given), given.n_requests // 5  # those before are cold
    image, sent, futures, busy = torch.zeros(*shape), [], [], 0
    with LiveServer(Executor(net, given, None, plan, devices=devices), shape) as server:
        begin = server.now()
        for r, at in enumerate(given.arrival):
            sleep(max(0, begin + at - server.now()) / 1e9)
            busy -= int(server.busy.sum()) if r == first else 0
            sent.append((server.now() - begin) / 1e6)
            futures.append(server.submit(image))
    busy += int(server.busy.sum())
    mean = float(np.mean([future.result().ms for future in futures[first:]]))

    def simulated(extra: float, router_ms: float) -> tuple[Costs, float, float]:
        """Costs with a constant added to `launch_ms`; their busy time and mean latency."""
        servers = [replace(one, launch_ms=max(0, one.launch_ms + extra)) for one in costs.servers]
        scenario = given.replace(servers=servers, router_ms=router_ms, arrival_ms=sent)
        run = simulate(scenario, plan=plan)
        assert run.log is not None
        rows = run.log.batches[run.log.batches["start"] >= scenario.arrival[first]]
        latency = float((run.finish - scenario.arrival)[first:].mean()) / 1e6
        worked = float((rows["end"] - rows["start"]).sum())
        return costs._replace(servers=servers, router_ms=router_ms), worked, latency

    error = simulated(0, costs.router_ms)[2] / mean - 1
    least = -max(one.launch_ms for one in costs.servers)
    extra = _root(lambda x: simulated(x, costs.router_ms)[1] - busy, least, mean)
    router_ms = _root(lambda x: simulated(extra, x)[2] - mean, 0, mean)
    return simulated(extra, router_ms)[0]._replace(error=error)


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Root of an increasing function, by bisection."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return low


def fit(server: Server, cases: IntArray, ms: FloatArray, mmac: FloatArray) -> Server:
    """Fit launch and costs of a server by least relative errors; `parallel` is the gain measured.

    Rows of `cases`: segment, input width, width, images, batches at a time; `ms` until all end.
    """
    from scipy.optimize import nnls

    k, i, w, n, together = cases.T
    a = np.zeros((len(ms), 1 + mmac.size))
    a[:, 0] = 1 / ms
    a[np.arange(len(ms)), 1 + np.ravel_multi_index((k, i, w), mmac.shape)] = n / ms
    launch, *cost = nnls(a[together == 1], np.ones(int((together == 1).sum())))[0]
    table: Any = np.reshape(cost, mmac.shape)
    table[0] = table[0, :1]  # images have one width
    gain = together * ms[np.arange(len(ms)) + 1 - together] / ms
    most = max(float(np.median(gain[together == m])) for m in {*together.tolist()})
    return replace(
        server, launch_ms=float(launch), ms_per_mmac=float(table.sum() / mmac.sum()),
        cost_ms=table.tolist(), parallel=max(1, round(most)),
    )  # fmt: skip
