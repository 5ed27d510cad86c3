"""Measure the costs of a network on this machine and make a scenario of them."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.serving.plan import Plan
from optsched.serving.routers import JSED, RandomWidth, Router
from optsched.serving.scenario import Scenario
from optsched.serving.tables import SLOTS, Contention, Server
from optsched.serving.workload import arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.model.schedule import IntArray
    from optsched.serving.network import Segmented
    from optsched.serving.server_process import Servers
    from optsched.serving.tables import FloatArray

_WARM: Final = 2  # warm-up rounds
_TRIAL: Final = 1000  # requests of the trial


class DeviceCosts(NamedTuple):
    """Costs on one server; `error` is the mean relative error on batches held out of the fit.

    `in_use` is the factor of its costs while requests are served, see `profile`.
    """

    server: Server
    error: float | None
    in_use: float = 1.0


class Costs(NamedTuple):
    """Costs of a network on this machine, with the fields of `Scenario`.

    Examples
    --------
    >>> from optsched import serving
    >>> from optsched.serving.profiler import DeviceCosts
    >>> server = serving.Server("cpu", 64, launch_ms=0.5, ms_per_mmac=1, idle_w=0, peak_w=0)
    >>> costs = serving.Costs(8, [0.5, 1], [[[1, 2]]], [[5, 10]], [DeviceCosts(server, None)])
    >>> costs.scenario({"0": 60, "1": 70}, rate=50, seconds=0.1)
    Scenario('', 7 requests, 1 servers, 1 segments, widths (0.5, 1.0))
    """

    max_batch: int
    widths: Sequence[float]
    mmac: list[list[list[float]]]
    vram_mb: list[list[float]]
    devices: list[DeviceCosts]
    router_ms: float = 0.0

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
        accuracy
            See `measure_accuracy`.
        rate, burst, seconds, seed
            See `arrivals`.
        fields
            Other fields of `Scenario`.
        """
        given = {key: value for key, value in self._asdict().items() if key != "devices"} | {
            "accuracy": accuracy,
            "servers": [one.server for one in self.devices],
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
    repeats: int = 20,
    seed: int = 0,
    on_progress: Callable[[int, int], object] | None = None,
) -> Costs:
    """Measure every segment, input width, width and batch on every server, and fit its costs.

    The servers are those of `Executor`, all busy; times are measured in the parent process and
    include messages. Instances have all widths; some are measured several at a time. At last,
    trials serve requests at half of the capacity: all costs of a server are scaled to its batches.

    Parameters
    ----------
    net, devices
        Any weights; see `Segmented` and `Servers`.
    batches
        Sizes; the largest becomes the scenario's `max_batch`.
    side, shape
        Pixels of the side of an image for a `SlimResNet`; the shape of an image for others.
    repeats
        Rounds in random orders, of which medians are taken.
    seed
        Of the orders and of the batches held out of the fit.
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
             for n in sizes for m in range(1, each + 1) if m == 1 or n == sizes[0]]  # fmt: skip
    inner = [row for row, (*_, n, m) in enumerate(cases) if m == 1 and sizes[0] < n < sizes[-1]]
    held = np.zeros(len(cases), np.bool_)
    held[rng.permutation(inner)[: len(inner) // 4].astype(np.int64)] = True
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
        found.append(fit(one, np.array(cases), np.median(ms[_WARM:, s], axis=0), held, mmac))
    costs = Costs(sizes[-1], net.widths, mmac.tolist(), vram_mb.tolist(), found)
    for _ in range(2):  # the second trial is at half of the capacity that the first has found
        costs = _in_use(net, costs, devices, shape)
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
    ms = np.zeros((rounds, len(every), len(cases)))
    for done, row in enumerate(ms, 1):
        for step in zip(*[rng.permutation(len(cases)).tolist() for _ in every], strict=True):
            tasks = []
            for s, c in enumerate(step):
                j, i, v, n, m = cases[c]
                task = ("run", j, v, [(i, list(range(n)))])
                tasks += [(s, j * each + slot, task) for slot in range(m)]
            times = np.array(servers.run(tasks))
            to = np.array(tasks, object)[:, 0]
            row[every, step] = [times[to == s].mean() for s in every]
            sleep(times.max() / 1e3)  # idle time between batches, as in use
        if on_progress is not None:
            on_progress(done, rounds)
    return ms


def _in_use(net: Segmented, costs: Costs, devices: Sequence[str], shape: Sequence[int]) -> Costs:
    """Correct costs by a trial at half of the capacity: the router uses the same cores.

    Costs of a server are scaled by the mean duration of its batches that started alone. The
    duration of a decision is the mean time from a request's arrival, or the end of its batch, to
    its next queue.
    """
    import torch

    from optsched.serving.executor import Executor

    k, w = np.shape(costs.vram_mb)
    alone = max(k * one.server.launch_ms + np.mean(one.server.cost_ms, axis=(1, 2)).sum()
                for one in costs.devices)  # fmt: skip
    rate = 500 * len(devices) / alone
    scenario = costs.scenario(np.zeros((w,) * k), rate=rate, seconds=_TRIAL / rate)
    rows = [(s, j, w - 1) for s in range(len(devices)) for j in range(k)]
    plan, router = Plan.of(rows * (SLOTS // k)), Router(RandomWidth(), JSED(), 1)
    images = torch.zeros(scenario.n_requests, *shape)
    log = Executor(net, scenario, router, plan, devices=devices).run(images).log
    assert log is not None
    r, queued, batch = log.entries["request"], log.entries["queued"], log.batches
    of = np.repeat(np.arange(len(batch)), batch["images"])
    at = batch["segment"][of]
    before, width = np.zeros((2, scenario.n_requests, k + 1), np.int64)
    before[:, 0], before[r, at + 1] = scenario.arrival, batch["end"][of]
    width[r, at + 1] = batch["width"][of]
    widest = np.zeros(len(batch), np.int64)
    np.maximum.at(widest, of, width[r, at])
    to, end = batch["server"], batch["end"]
    work = scenario.cost[to, batch["segment"], widest, batch["width"]] * batch["images"]
    fitted, found = work + scenario.launch[to], []
    for s, one in enumerate(costs.devices):
        row = np.flatnonzero(to == s)
        row = row[np.argsort(batch["start"][row], kind="stable")]
        free = np.maximum.accumulate(np.append(0, end[row][:-1]))
        row = row[batch["start"][row] >= free]
        factor = float((end - batch["start"])[row].sum() / max(fitted[row].sum(), 1.0)) or 1.0
        server = replace(
            one.server, launch_ms=one.server.launch_ms * factor,
            ms_per_mmac=one.server.ms_per_mmac * factor,
            cost_ms=(np.array(one.server.cost_ms) * factor).tolist(),
        )  # fmt: skip
        found.append(one._replace(server=server, in_use=factor * one.in_use))
    return costs._replace(devices=found, router_ms=float((queued - before[r, at]).mean()) / 1e6)


def fit(
    server: Server, cases: IntArray, ms: FloatArray, held: Any, mmac: FloatArray
) -> DeviceCosts:
    """Fit the costs of a server by least relative errors; `mmac` is [segment][input width][width].

    `cases` are rows (segment, input width, width, images, batches at a time), `ms` the durations of
    such batches; those `held` out of the fit are for its error.

    First launch and costs, from single batches, by non-negative least squares. Then contention, by
    a grid of knees; the slope above the knee makes the sum over all samples exact. The slope below
    is 0, since the load of a single batch is included in its cost.
    """
    from scipy.optimize import nnls

    k, i, w, n, together = cases.T
    many = together > 1
    column = 1 + np.ravel_multi_index((k, i, w), mmac.shape)
    a = np.zeros((len(ms), 1 + mmac.size))
    a[:, 0], a[np.arange(len(ms)), column] = 1 / ms, n / ms
    seen = ~held & ~many
    x = nnls(a[seen], np.ones(int(seen.sum())))[0]
    launch, work = float(x[0]), n * x[column]
    residual, best, slower = ms - launch - work, None, np.zeros(len(ms))
    least = float((0.9 * residual[many] ** 2 - 1e-12 * ms[many] ** 2).sum())
    sat = float(mmac[k, i, w].min()) / 1e3  # any batch has a load of 1: U is their number
    for knee in 1.02 * np.linspace(1, together.max(), 20)[: 19 * int(many.any())]:
        over = work * np.maximum(0, 1.02 * together - knee)
        above = max(0.0, float(residual[many].sum() / max(over[many].sum(), 1e-300)))
        off = float(((residual - above * over)[many] ** 2).sum())
        if off < least:
            least, slower, best = off, above * over, Contention(float(knee), 0.0, above)
    fitted = launch + work + slower
    error = np.abs(fitted - ms) / ms
    cost: Any = x[1:].reshape(mmac.shape)
    cost[0] = cost[0, :1]  # images have one width
    per_mmac = float(cost.sum() / mmac.sum())
    rule: dict[str, Any] = {} if best is None else {"sat_mmac": sat, "contention": best}
    found = replace(server, launch_ms=launch, ms_per_mmac=per_mmac, cost_ms=cost.tolist(), **rule)
    return DeviceCosts(found, float(error[held].mean()) if held.any() else None)
