"""Reference scenarios: servers, costs of the network, and arrivals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text
from optsched.io.values import integer, number, one_of
from optsched.serving.scenario import Scenario
from optsched.serving.tables import WIDTHS, Contention, Link, Server, additive, non_negative

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.serving.tables import FloatArray

SLOWDOWN: Final = Contention(knee=0.92, below=0.5, above=12.0)
FAST: Final = {
    "vram_mb": 11_000, "launch_ms": 1.2, "ms_per_mmac": 1 / 1600, "idle_w": 55, "peak_w": 260,
    "load_ms": 20, "sat_mmac": 4000, "contention": SLOWDOWN,
}  # fmt: skip
SLOW: Final = {
    "vram_mb": 6_000, "launch_ms": 1.8, "ms_per_mmac": 1 / 600, "idle_w": 60, "peak_w": 250,
    "load_ms": 20, "sat_mmac": 2000, "contention": SLOWDOWN,
}  # fmt: skip
VRAM_MB: Final = (600, 900, 1300, 1800)
"""Memory of an instance, by width."""

LINKS: Final = {"cluster-3gpu": False, "cluster-3gpu-wifi": True}
_PHASES = (0.2, 0.8)  # mean seconds of the phases of high and of low rate


def network_mmac(
    channels: Sequence[int] = (64, 128, 256, 512),
    widths: Sequence[float] = WIDTHS,
    *,
    side: int = 32,
    classes: int = 100,
    blocks: int = 2,
    in_channels: int = 3,
) -> list[list[list[float]]]:
    """Return millions of multiply-accumulates of `SlimResNet`, [segment][input width][width].

    `side`, the pixels of an image's side, is halved (rounded up) before all segments but the first.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.network_mmac((8, 16), (0.5, 1), side=8, classes=10)[0]  # first segment
    [[0.043776, 0.16128]]
    """
    found = []
    for k, wide in enumerate(channels):
        pixels, last = (-(-side // 2**k)) ** 2, k == len(channels) - 1
        inputs = [channels[k - 1] * width for width in widths] if k else [in_channels]
        # segment 0: the stem reads the input; others: projection and first convolution do
        reads, others = (10, 18 * blocks - 9) if k else (9, 18 * blocks)
        found.append([
            [(pixels * (reads * ci * co + others * co * co) + last * classes * co) / 1e6
             for co in (wide * width for width in widths)]
            for ci in inputs
        ])  # fmt: skip
    return found


def reference(
    name: str = "cluster-3gpu",
    *,
    rate: float = 2500.0,
    burst: float = 1.0,
    seconds: float = 8.0,
    seed: int = 0,
    **fields: Any,
) -> Scenario:
    """Return SlimResNet-18 on two fast servers and a slow one: plausible devices, not measured.

    Parameters
    ----------
    name
        ``"cluster-3gpu"``, or ``"cluster-3gpu-wifi"``, with servers 2 ms and 300 Mbit/s apart.
    rate, burst, seconds, seed
        See `arrivals`.
    fields
        Other fields of `Scenario`.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.reference(rate=2500, burst=3, seconds=1, seed=1)
    Scenario('cluster-3gpu', 4909 requests, 3 servers, 4 segments, widths (0.25, 0.5, 0.75, 1.0))
    """
    link = None
    if LINKS[one_of("name", name, list(LINKS))]:
        sizes = [[4e-6 * 64 * 2**k * w * (32 // 2**k) ** 2 for w in WIDTHS] for k in range(4)]
        link = Link(2.0, 8 / 300 * 1000, sizes)
    given: dict[str, Any] = {
        "widths": WIDTHS, "mmac": network_mmac(), "vram_mb": [VRAM_MB] * 4, "max_batch": 64,
        "accuracy": additive(), "router_ms": 0.15, "link": link, "name": name,
        "servers": [Server("fast0", **FAST), Server("fast1", **FAST), Server("slow", **SLOW)],  # type: ignore[arg-type]
        "arrival_ms": arrivals(rate, burst=burst, seconds=seconds, seed=seed),
    }  # fmt: skip
    return Scenario(**{**given, **fields})


def arrivals(rate: float, *, burst: float = 1.0, seconds: float = 8.0, seed: int = 0) -> FloatArray:
    """Draw arrival times in ms: a Poisson process, or one that changes between two phases.

    Durations of phases are exponential, with means .2 s (`burst` times the mean rate) and .8 s (at
    least a twentieth of the mean rate); a change applies from the next arrival on.

    Parameters
    ----------
    rate, burst
        Mean arrivals per second; their peak over the mean, 1: Poisson.
    seconds, seed
        Length of the trace; seed of a separate stream of random numbers.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.arrivals(rate=100, seconds=0.05).round(1).tolist()
    [6.8, 17.0, 17.2, 17.2, 22.7, 39.0, 45.8]
    """
    rate, seconds = non_negative("rate", rate), non_negative("seconds", seconds)
    burst = number("burst", burst, 1.0)
    if (most := rate * burst * seconds) > 1e8:
        raise InputError(f"rate, burst, seconds: {most:.3g} requests are too many")
    stream = np.random.SeedSequence([integer("seed", seed, 0, 2**31 - 1), 0])
    rng = np.random.Generator(np.random.PCG64(stream))
    if burst == 1:
        n = round(rate * seconds + 8 * math.sqrt(rate * seconds) + 16)
        at = np.cumsum(rng.exponential(1, n)) / max(rate, 1e-12)
        return np.round(at[at < seconds] * 1e3, 6)
    high, low = _PHASES
    rates = (rate * burst, rate * max(0.05, (1 - high * burst) / low))
    found, now, phase, change = [], 0.0, 0, rng.exponential(high)
    while rate > 0:
        now += rng.exponential(1 / rates[phase])
        if now >= seconds:
            break
        found.append(now)
        while now > change:
            phase = 1 - phase
            change += rng.exponential(_PHASES[phase])
    return np.round(np.array(found, np.float64) * 1e3, 6)


def read_arrivals(path: str | os.PathLike[str]) -> FloatArray:
    r"""Read recorded arrivals: a CSV file with one column ``arrival_ms``, ascending.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from optsched import serving
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "trace.csv")
    ...     _ = path.write_text("arrival_ms\n0\n1.5\n")
    ...     serving.read_arrivals(path).tolist()
    [0.0, 1.5]
    """
    found: list[float] = []
    for place, row in csv_records(read_text(path), str(path), ("arrival_ms",), ("arrival_ms",)):
        try:
            value = non_negative("arrival_ms", float(row["arrival_ms"]))
        except ValueError:
            value = -1.0
        if value < 0 or (found and value < found[-1]):
            got = f"{row['arrival_ms']!r:.60}"
            raise InputError(
                f"{place}: arrival_ms: expected a number >= the previous row, got {got}"
            )
        found.append(value)
    return np.array(found, np.float64)
