"""Parts of a scenario, checked: numbers, tables, servers, links, accuracy of width tuples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import frozen, integer, label, number

if TYPE_CHECKING:
    from collections.abc import Iterable

FloatArray = npt.NDArray[np.float64]

NS_PER_MS = 10**6
NEVER: Final = 2**62
SLOTS: Final = 12
"""Maximum number of instances on a server."""
POINTS = 10_000
"""Parts of a percentage point in which accuracies are counted."""

MAX_MS = 2**53 / 10**6
"""104 days: as ns every JSON reader represents it exactly."""
MAX_VALUE = 1e12
"""Upper limit of all other numbers."""


def fields(integers: str, reals: str = "") -> np.dtype[Any]:
    """Return the type of a record of integers, followed by real numbers."""
    rows = [(name, "i8") for name in integers.split()]
    return np.dtype(rows + [(name, "f8") for name in reals.split()])


def non_negative(place: str, given: Any) -> float:
    """Return a number from 0 to `MAX_VALUE`."""
    return number(place, given, most=MAX_VALUE)


def milliseconds(place: str, given: Any) -> float:
    """Return a duration that fits int64 ns."""
    return number(place, given, most=MAX_MS, what="milliseconds")


def table(place: str, given: Any, axes: int) -> FloatArray:
    """Return a frozen array with this number of axes and values from 0 to `MAX_VALUE`."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise InputError(f"{place}: expected rows of one length") from None
    if array.dtype.kind not in "iuf" or array.ndim != axes:
        if array.size:
            raise InputError(
                f"{place}: expected {'rows of ' * (axes - 1)}numbers, got {given!r:.60}"
            )
        array = np.zeros((0,) * axes)
    for at in np.argwhere(~((array >= 0) & (array <= MAX_VALUE)))[:1]:
        where = "".join(f"[{i}]" for i in at)
        raise InputError(f"{place}{where}: expected 0 to {MAX_VALUE:g}, got {array[tuple(at)]}")
    return frozen(array.astype(np.float64))


def work_table(place: str, given: Any, widths: int) -> FloatArray:
    """Return [segment][input width][width]; the rows of segment 0 are all its first one."""
    if not isinstance(given, (list, tuple, np.ndarray)) or not len(given):
        raise InputError(f"{place}: expected a table [segment][input width][width]")
    rows = []
    for k, part in enumerate(given):
        found = table(f"{place}[{k}]", part, 2)
        expected = (widths, widths) if k or found.shape == (widths, widths) else (1, widths)
        if found.shape != expected:
            raise InputError(f"{place}[{k}]: expected shape {expected}, got {found.shape}")
        rows.append(np.repeat(found[:1], widths, axis=0) if k == 0 else found)
    return frozen(np.array(rows))


def times(place: str, given: Any) -> npt.NDArray[np.int64]:
    """Return milliseconds as whole ns, rounded up beyond the last bit of the float."""
    found = table(place, given, 1)
    for i in np.flatnonzero(found > MAX_MS)[:1]:
        raise InputError(f"{place}[{i}]: expected at most {MAX_MS:.0f} ms, got {found[i]:g}")
    exact = found * 1e6
    near = np.rint(exact)
    whole = np.abs(exact - near) <= np.maximum(1e-3, exact * 4e-16)
    rounded: FloatArray = np.where(whole, near, np.ceil(exact))
    return frozen(rounded.astype(np.int64))


def identifiers(place: str, given: Iterable[Any]) -> list[int | str]:
    """Return distinct names, integers or strings."""
    seen: dict[int | str, int] = {}
    for i, name in enumerate(given):
        whole = isinstance(name, (int, np.integer)) and not isinstance(name, bool)
        found = int(name) if whole else label(f"{place}[{i}].id", name)
        if found in seen:
            raise InputError(
                f"{place}[{i}].id: {found!r:.60} is also the id of {place}[{seen[found]}]"
            )
        seen[found] = i
    return list(seen)


# servers


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slowdown of batches that run together on a server.

    With U the sum of their loads, a batch takes 1 + below * min(U, knee) + above * max(0, U - knee)
    times as long.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Contention(knee=0.92, below=0.5, above=12)
    Contention(knee=0.92, below=0.5, above=12)
    """

    knee: float
    below: float
    above: float


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time to move the activations of an image between servers: latency + size * ms_per_mb.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.reference("cluster-3gpu-wifi", rate=50, seconds=0.1).link.latency_ms
    2.0
    """

    latency_ms: float
    ms_per_mb: float
    activation_mb: list[list[float]]
    """Size of the output of one image, [segment][width]."""


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU, or a share of a CPU.

    Parameters
    ----------
    id
        Name in documents.
    vram_mb
        Memory for instances, to the thousandth.
    launch_ms
        Constant part of the duration of a batch.
    ms_per_mmac
        Time of a million multiply-accumulates.
    idle_w, peak_w
        Power at no and at full load.
    load_ms
        Time to load an instance; None: none.
    sat_mmac
        Work of a batch that alone half fills the server; None: batches do not slow each other.
    contention
        Needs `sat_mmac`.
    cost_ms
        Measured time per image, [segment][input width][width], instead of MMACs * `ms_per_mmac`.
    parallel
        Most batches at a time, such as the number of cores; None: one an instance.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Server("cpu", vram_mb=64, launch_ms=0.5, ms_per_mmac=1, idle_w=0, peak_w=0).load_ms
    """

    id: int | str
    vram_mb: float
    launch_ms: float
    ms_per_mmac: float
    idle_w: float
    peak_w: float
    load_ms: float | None = None
    sat_mmac: float | None = None
    contention: Contention | None = None
    cost_ms: Any = None
    parallel: int | None = None


def checked_server(s: int, given: Any, shape: tuple[int, int]) -> Server:
    """Return a server with checked fields; `shape` is that of tables [segment][width]."""
    place = f"servers[{s}]"
    if not isinstance(given, Server):
        raise InputError(f"{place}: expected a Server, got {given!r:.60}")
    found: dict[str, Any] = {"id": given.id}
    for key in Server.__struct_fields__[1:8]:
        value = getattr(given, key)
        if value is not None or key not in ("load_ms", "sat_mmac"):
            check = milliseconds if key in ("launch_ms", "load_ms") else non_negative
            found[key] = check(f"{place}.{key}", value)
    if found["peak_w"] < found["idle_w"]:
        raise InputError(f"{place}.peak_w: {given.peak_w} is below idle_w, {given.idle_w}")
    if found.get("sat_mmac", 1.0) < 1e-9:
        raise InputError(f"{place}.sat_mmac: expected a number > 0, got {given.sat_mmac}")
    if given.contention is not None:
        if given.sat_mmac is None:
            raise InputError(f"{place}.contention: needs sat_mmac")
        if not isinstance(given.contention, Contention):
            raise InputError(f"{place}.contention: expected a Contention")
        rule = msgspec.structs.asdict(given.contention).items()
        found["contention"] = Contention(
            **{key: non_negative(f"{place}.contention.{key}", value) for key, value in rule}
        )
    if given.cost_ms is not None:
        if (k := len(work_table(f"{place}.cost_ms", given.cost_ms, shape[1]))) != shape[0]:
            raise InputError(f"{place}.cost_ms: expected {shape[0]} segments, got {k}")
        found["cost_ms"] = [np.asarray(part, np.float64).tolist() for part in given.cost_ms]
    if given.parallel is not None:
        found["parallel"] = integer(f"{place}.parallel", given.parallel, 1, SLOTS)
    return Server(**found)


def checked_link(given: Any, shape: tuple[int, int]) -> Link:
    """Return a link with checked fields."""
    if not isinstance(given, Link):
        raise InputError(f"link: expected a Link, got {given!r:.60}")
    latency = milliseconds("link.latency_ms", given.latency_ms)
    per_mb = non_negative("link.ms_per_mb", given.ms_per_mb)
    sizes = table("link.activation_mb", given.activation_mb, 2)
    if sizes.shape != shape:
        raise InputError(f"link.activation_mb: expected shape {shape}, got {sizes.shape}")
    milliseconds("link: the longest transfer", latency + per_mb * sizes.max())
    return Link(latency, per_mb, sizes.tolist())


# accuracy

WIDTHS: Final = (0.25, 0.5, 0.75, 1.0)

PUBLISHED: Final[Mapping[tuple[int, ...], float]] = {
    (0, 0, 0, 0): 70.30, (1, 1, 1, 1): 72.99, (2, 2, 2, 2): 74.93, (3, 3, 3, 3): 76.43,
    (3, 2, 1, 0): 71.35, (2, 3, 0, 1): 72.33, (1, 0, 3, 2): 74.53, (0, 1, 2, 3): 75.33,
}  # fmt: skip
"""Top-1 on CIFAR-100, percent, of four segments at `WIDTHS` (Slim Scheduler, Tables I and II)."""


def additive(known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: int = 4) -> FloatArray:
    """Estimate all tuples: each segment adds its share of the gain of the uniform tuples.

    A = U(0) + sum_k c_k (U(w_k) - U(0)) with U the uniform tuples' accuracies and c >= 0, sum 1,
    by least squares over the mixed tuples; equal shares if none is known. Exact on uniform tuples;
    the published mixed tuples are estimated .26 to .29 points too high.

    Parameters
    ----------
    known
        Percent by tuple of width indices; all uniform tuples among them.
    widths
        W; the result, in percent, has an axis of this length per segment.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.additive({(0, 0): 60, (1, 1): 70}, widths=2).tolist()
    [[60.0, 65.0], [65.0, 70.0]]
    """
    segments = len(next(iter(known)))
    uniform = [(w,) * segments for w in range(widths)]
    for row in uniform:
        if row not in known:
            raise InputError(f"accuracy: the additive prior needs the uniform tuple {row}")
    gain = np.array([known[row] for row in uniform]) - known[uniform[0]]
    mixed = [row for row in known if len(set(row)) > 1]
    target = np.array([known[row] - known[uniform[0]] for row in mixed])
    share = _shares(gain[np.array(mixed, np.int64).reshape(-1, segments)], target)
    added = [gain[at] * share[k] for k, at in enumerate(np.indices((widths,) * segments))]
    return sum(added, np.full((widths,) * segments, float(known[uniform[0]])))


def nearest(
    known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: npt.ArrayLike = WIDTHS
) -> FloatArray:
    """Estimate every tuple by the nearest known one, as in the paper.

    The distance is L1 in widths, ties go to the lower accuracy. Of the published table this lowers
    the estimate for 90 of the 768 single widenings.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.nearest({(0, 0): 60, (1, 1): 70}, widths=(0.5, 1)).tolist()
    [[60.0, 60.0], [60.0, 70.0]]
    """
    value = np.asarray(widths, np.float64)
    rows = sorted(known.items(), key=lambda item: (item[1], item[0]))
    points = value[np.array([row for row, _ in rows])]
    segments = points.shape[1]
    every = value[np.indices((len(value),) * segments).reshape(segments, -1).T]
    distance = np.round(np.abs(every[:, None, :] - points[None]).sum(axis=2), 9)
    percent: FloatArray = np.array([one for _, one in rows], np.float64)[distance.argmin(axis=1)]
    return percent.reshape((len(value),) * segments)


def tuple_keys(n: int, segments: int) -> list[str]:
    """Return all tuples of n widths as in documents, the last one counting fastest."""
    return [",".join(map(str, row)) for row in np.ndindex((n,) * segments)]


def accuracy_table(given: Mapping[str, float] | npt.ArrayLike, n: int, segments: int) -> FloatArray:
    """Return the accuracy of all tuples in the order of `tuple_keys`; see `Scenario`."""
    keys = tuple_keys(n, segments)
    if isinstance(given, Mapping):
        for key in given.keys() - {*keys}:
            raise InputError(
                f'accuracy: expected {segments} indices of widths such as "{keys[0]}", got '
                f"{key!r:.60}"
            )
        if missing := len(keys) - len(given):
            raise InputError(
                f"accuracy: {missing} of {len(keys)} tuples are missing; estimate them by "
                "serving.additive or serving.nearest"
            )
        flat = np.array([non_negative(f"accuracy[{key!r}]", given[key]) for key in keys])
    else:
        flat = table("accuracy", given, max(1, np.ndim(given))).ravel()
        if len(flat) != len(keys):
            raise InputError(f"accuracy: expected {len(keys)} numbers, got {len(flat)}")
    for at in np.flatnonzero(flat > 100)[:1]:
        raise InputError(f'accuracy["{keys[at]}"]: expected a percentage in 0..100, got {flat[at]}')
    return frozen(np.rint(flat * POINTS) / POINTS)


def _shares(gain: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares over c >= 0 with sum 1."""
    from scipy.optimize import nnls

    n = gain.shape[1]
    if not len(target):
        return np.full(n, 1 / n)
    weight = 1e6 * max(1.0, float(np.abs(gain).max()))  # of the equation that the sum is 1
    found = nnls(np.vstack([gain, np.full(n, weight)]), np.append(target, weight))[0]
    share: FloatArray = found / found.sum()
    return share
