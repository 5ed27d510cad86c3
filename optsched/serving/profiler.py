"""What segments take on this machine, and the scenario that follows from it."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.files import read_text, write_atomic
from optsched.limits import whole_number
from optsched.problems.routing import Contention, Routing, Server
from optsched.problems.routing.checks import MOST_TUPLES
from optsched.problems.routing.plan import SLOTS
from optsched.serving.workload import arrivals
from optsched.strict_json import check_format, decode, parse

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from optsched.problems.routing.problem import FloatArray
    from optsched.serving.network import SlimResNet
    from optsched.serving.server_process import Servers, Task

FORMAT: Final = "optsched.serving-costs/1"
_WARM: Final = 2  # rounds that are not counted
_Number = Annotated[float, msgspec.Meta(ge=0)]
_Table = list[list[list[_Number]]]
_Case = tuple[int, int, int, int]  # segment, input width, width, batch


class Sample(NamedTuple):
    """The median ms of a batch while so many of its kind run together, and what the fit says."""

    segment: int
    input_width: int
    width: int
    batch: int
    together: int
    ms: _Number
    held_out: bool
    fitted_ms: float = 0.0


class DeviceCosts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What batches take on one server, with the fields of `Server`."""

    device: str
    launch_ms: _Number
    load_ms: _Number
    cost_ms: _Table
    sat_mmac: _Number | None
    contention: Contention | None
    error: float | None
    """Mean relative error on the samples of single batches that the fit has not seen."""
    contention_error: float | None
    """The same on all samples of several batches."""
    samples: list[Sample]


class Costs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The document ``optsched.serving-costs/1``."""

    format: str
    max_batch: int
    widths: list[float]
    mmac: _Table
    vram_mb: list[list[_Number]]
    """Weights of an instance, and the activations of its largest batch."""
    devices: list[DeviceCosts]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the document."""
        write_atomic(path, msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Costs:
        """Read the document; `InputError` with the path in it, the rule and the value."""
        tree = parse(read_text(path), str(path))
        check_format(tree, FORMAT, str(path))
        found = decode(tree, cls, str(path))
        tuples = len(found.widths) ** len(found.mmac)
        accuracy = np.zeros((len(found.widths),) * len(found.mmac) if tuples <= MOST_TUPLES else 0)
        try:
            scenario(found, accuracy, rate=0)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return found


def scenario(
    costs: Costs,
    accuracy: Mapping[str, float] | Any,
    *,
    rate: float = 60.0,
    burst: float = 1.0,
    seconds: float = 20.0,
    seed: int = 0,
    vram_mb: float | None = None,
    **fields: Any,
) -> Routing:
    """Requests for the machine whose costs were measured; its servers take no power.

    Parameters
    ----------
    costs
        See `profile`.
    accuracy
        Of the network (`measure_accuracy`).
    rate, burst, seconds, seed
        See `arrivals`.
    vram_mb
        Memory of every server; None: enough for as many instances as a server holds.
    fields
        Other fields of `Routing`, such as `router_ms`.
    """
    most = SLOTS * max((size for row in costs.vram_mb for size in row), default=0.0)
    work = sum(value for part in costs.mmac for row in part for value in row)
    servers = [
        Server(
            f"{one.device}-{s}", most if vram_mb is None else vram_mb, one.launch_ms,
            sum(value for part in one.cost_ms for row in part for value in row) / max(work, 1e-9),
            0, 0, one.load_ms, one.sat_mmac, one.contention, one.cost_ms,
        )
        for s, one in enumerate(costs.devices)
    ]  # fmt: skip
    given: dict[str, Any] = {
        "widths": costs.widths, "mmac": costs.mmac, "vram_mb": costs.vram_mb,
        "accuracy": accuracy, "servers": servers, "max_batch": costs.max_batch,
        "arrival_ms": arrivals(rate, burst=burst, seconds=seconds, seed=seed),
    }  # fmt: skip
    return Routing(**{**given, **fields})


def profile(
    net: SlimResNet,
    devices: Sequence[str] = ("cpu", "cpu"),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    side: int = 32,
    repeats: int = 20,
    instances: int = 4,
    seed: int = 0,
    on_progress: Callable[[int, int], object] | None = None,
) -> Costs:
    """Measure every segment, input width, width and batch on every server, and fit its costs.

    The servers are those of `Executor`, all at work, and a time is what the parent process sees:
    messages count. Instances have all widths.

    Parameters
    ----------
    net
        Its weights do not matter.
    devices
        See `Servers`.
    batches
        Sizes; the largest becomes the scenario's `max_batch`.
    side
        Pixels of an image's side.
    repeats
        Rounds, each in an order of its own, of which medians are taken.
    instances
        As many of a kind run together at most, to fit how they slow each other down.
    seed
        Of the orders, and of the fifth that the fit does not see.
    on_progress
        Called with rounds done and rounds to do.
    """
    from optsched.serving.server_process import Servers

    sizes = sorted({whole_number("batches", n, 1, 4096) for n in batches})
    if not sizes:
        raise InputError("batches: expected at least one size, got none")
    rng = np.random.default_rng(whole_number("seed", seed, 0, 2**31 - 1))
    rounds = _WARM + whole_number("repeats", repeats, 1, 10_000)
    most = whole_number("instances", instances, 1, SLOTS)
    mmac = np.array([part * len(net.widths) if len(part) == 1 else part for part in net.mmac(side)])
    k, w, _ = mmac.shape
    cases = [(j, i, v, n) for j in range(k) for i in range(w if j else 1) for v in range(w)
             for n in sizes]  # fmt: skip
    few = [one for one in cases if one[1] in (0, w - 1) and one[2] in (0, w - 1)
           and one[3] in (sizes[0], sizes[len(sizes) // 2])] * (most > 1)  # fmt: skip
    inner = [row for row, one in enumerate(cases) if sizes[0] < one[3] < sizes[-1]]
    held = {*rng.permutation(inner)[: len(cases) // 5].tolist()}
    done = itertools.count(1)

    def tell() -> None:
        if on_progress is not None:
            on_progress(next(done), rounds + len(few))

    with Servers(net, devices, side, sizes[-1]) as servers:
        servers.memory.normal_()
        loads = [(j, ("load", j, v)) for _ in range(3) for j in range(k) for v in range(w)]
        load_ms = servers.run([[(s, *one) for one in loads] for s in range(len(devices))])
        alone = _measure_alone(servers, cases, rounds, rng, tell)
        together = _measure_together(servers, few, rounds, most, tell)
        memory = [[sum(p.nbytes for p in net.sliced(j, v).parameters()) + servers.memory.nbytes
                   for v in range(w)] for j in range(k)]  # fmt: skip
    found = []
    for s, (device, _) in enumerate(servers.places):
        samples = [
            Sample(*one, 1, ms, row in held)
            for row, (one, ms) in enumerate(zip(cases, alone[s].tolist(), strict=True))
        ]
        samples += [Sample(*one, m, times * alone[s].tolist()[cases.index(one)], False)
                    for one, row in zip(few, together[s].tolist(), strict=True)
                    for m, times in enumerate(row, 2)]  # fmt: skip
        found.append(fit(device, float(np.median(load_ms[s])), samples, mmac))
    sizes_mb = (np.array(memory) / 1e6).round(3).tolist()
    return Costs(FORMAT, sizes[-1], list(net.widths), mmac.tolist(), sizes_mb, found)


def _measure_alone(
    servers: Servers, cases: list[_Case], rounds: int, rng: np.random.Generator,
    tell: Callable[[], None],
) -> FloatArray:  # fmt: skip
    """The median ms, [server][case]; servers rest between batches, as they do in use."""
    every = range(len(servers.places))
    found = np.zeros((rounds, len(every), len(cases)))
    for one in found:
        orders = [rng.permutation(len(cases)).tolist() for _ in every]
        for step in zip(*orders, strict=True):
            times = servers.run([[(s, cases[c][0], _run(cases[c]))] for s, c in enumerate(step)])
            one[every, step] = np.ravel(times)
            time.sleep(np.max(times) / 1e3)
        tell()
    medians: FloatArray = np.median(found[_WARM:], axis=0)
    return medians


def _measure_together(
    servers: Servers, cases: list[_Case], rounds: int, most: int, tell: Callable[[], None]
) -> FloatArray:
    """How many times as long 2, 3, ... of a case at a time take, [server][case][number]."""
    found = np.zeros((len(servers.places), len(cases), most))
    for c, case in enumerate(cases):
        for s, m in itertools.product(range(len(found)), range(most)):
            servers.run([[(s, m, ("load", case[0], len(servers.net.widths) - 1))]])
            times = servers.run([[(s, i, _run(case))] * rounds for i in range(m + 1)])
            found[s, c, m] = np.median(np.array(times)[:, _WARM:])
        tell()
    ratios: FloatArray = found[:, :, 1:] / found[:, :, :1]
    return ratios


def _run(case: _Case) -> Task:
    segment, i, width, n = case
    return ("run", segment, width, [(i, list(range(n)))])


# fitting


def fit(device: str, load_ms: float, samples: Sequence[Sample], mmac: FloatArray) -> DeviceCosts:
    """Costs with the least relative errors; `mmac` is [segment][input width][width].

    First launch and costs, from single batches. Then how many at a time slow each other down, over
    a grid of `sat_mmac` and knees; the slope above the knee follows. Below it there is none: what a
    batch does to itself is in its cost.
    """
    case = np.array([one[:4] for one in samples])
    k, i, w, n = case.T
    together, ms = np.array([one[4:6] for one in samples], np.float64).T
    held, many = np.array([one.held_out for one in samples]), together > 1
    column = 1 + np.ravel_multi_index((k, i, w), mmac.shape)
    a = np.zeros((len(ms), 1 + mmac.size))
    a[:, 0], a[np.arange(len(ms)), column] = 1 / ms, n / ms
    seen = ~held & ~many
    x = nnls(a[seen], np.ones(int(seen.sum())))
    launch, own = float(x[0]), n * x[column]
    rest = 1 - (launch + own) / ms  # relative errors without contention
    least, best, slower = 0.9 * float((rest[many] ** 2).sum()), None, np.zeros(len(ms))
    work = n * mmac[k, i, w]
    for sat in np.geomspace(work.min() / 1e3, work.max() * 1e2, 26) if many.any() else ():
        u = work / sat / (1 + work / sat) + 0.02
        for knee in u.max() + (np.max(together * u) - u.max()) * np.linspace(0, 0.95, 20):
            over = own * np.maximum(0, together * u - knee)
            ahead = (over / ms)[many]
            above = max(0.0, float(ahead @ rest[many]) / max(float(ahead @ ahead), 1e-300))
            off = float(((rest[many] - above * ahead) ** 2).sum())
            if off < least:
                least, slower = off, above * over
                best = float(sat), Contention(float(knee), 0.0, above)
    fitted = launch + own + slower
    error = np.abs(fitted - ms) / ms
    cost: Any = x[1:].reshape(mmac.shape)
    cost[0] = cost[0, :1]  # images have no width
    return DeviceCosts(
        device=device, launch_ms=launch, load_ms=load_ms, cost_ms=cost.tolist(),
        sat_mmac=best and best[0], contention=best and best[1],
        error=float(error[held].mean()) if held.any() else None,
        contention_error=float(error[many].mean()) if many.any() else None,
        samples=[one._replace(fitted_ms=float(said))
                 for one, said in zip(samples, fitted, strict=True)],
    )  # fmt: skip


def nnls(a: FloatArray, b: FloatArray) -> FloatArray:
    """Non-negative least squares: the x >= 0 with the least norm of ax - b.

    One coordinate after the other (Franc, Hlavac & Navara 2005).
    """
    gram, slope = a.T @ a, -(a.T @ b)
    x = np.zeros(len(gram))
    for _ in range(20_000):
        most = 0.0
        for j in np.flatnonzero(np.diag(gram) > 0).tolist():
            step = max(-x[j], -slope[j] / gram[j, j])
            x[j] += step
            slope += gram[:, j] * step
            most = max(most, abs(step) * math.sqrt(gram[j, j]))
        if most <= 1e-12 * float(np.linalg.norm(b)):
            break
    return x
