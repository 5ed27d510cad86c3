"""An analytic cost model: block times and bytes of four real models on A100 devices.

Per layer at batch size b: forward = max(flops (b + b_half) / (0.45 peak), 3 b out_bytes / hbm)
+ 60 us; backward = 2 forward; recomputation = forward; update = 16 bytes a parameter / hbm;
communication = b boundary / bandwidth + 15 us; job switch = state / (150 GB/s). All in exact
fractions, rounded up to whole microseconds per block.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer
from optsched.pipelines.models import Layer, Model, model_of
from optsched.pipelines.partition import balanced, naive
from optsched.problems.jobarray.checks import flat, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.model.schedule import IntArray

# an A100; rates per microsecond
FLOPS: Final = 156_000_000 * Fraction(45, 100)  # TF32 peak, the share of it that kernels reach
HBM: Final = 1_500_000  # bytes
SWITCH: Final = 150_000  # bytes of model state, from one buffer on the device to another
BANDWIDTH: Final = {"nvlink": 300_000, "pcie": 64_000, "infiniband": 50_000}
HOST: Final = BANDWIDTH["pcie"]  # bytes of model state, from the host to one device
LAUNCH: Final = 60  # microseconds a layer
LATENCY: Final = 15  # microseconds a message
UPDATE_BYTES: Final = 16  # read and written per parameter by an optimizer step

Link = Literal["nvlink", "pcie", "infiniband", "mixed"]


class Stage(NamedTuple):
    """Consecutive layers on one device; bytes are per sample, `state` is per job."""

    layers: tuple[Layer, ...]
    params: int
    state: int
    in_bytes: int
    out_bytes: int
    kept_bytes: int
    weight_bytes: int


def job_array_fields(
    model: str | Model,
    stages: int,
    batch_sizes: Sequence[int],
    *,
    link: Link = "nvlink",
    partition: Literal["balanced", "naive"] = "balanced",
    memory: str | int | None = None,
    micro_batches: int = 1,
    recompute_mode: str | Sequence[bool] = "never",
    recompute_workspace: bool = False,
    update: bool = True,
    switch: bool = False,
    place: Sequence[int] | None = None,
    split_backward: bool = False,
    prefetch: Literal["none", "slack"] = "none",
) -> dict[str, Any]:
    """Keyword arguments of `optsched.JobArray` for sibling jobs of one model.

    Parameters
    ----------
    model
        ``"vgg19"``, ``"resnet152"``, ``"bert_large"``, ``"gpt2_xl"``, or a `Model` of your own.
    stages
        Number of pipeline stages, one a device unless `place` says otherwise.
    batch_sizes
        Samples per iteration of every job; divided equally among its micro-batches.
    link
        Between neighbouring devices; ``"mixed"``: InfiniBand at every fourth cut, else NVLink.
    partition
        ``"balanced"``: least largest stage at the second smallest batch size; ``"naive"``: equal
        layer counts.
    memory
        The whole device, in bytes or as ``"80GB"`` (as vendors label it: 2^30 bytes each); two
        buffers of the stage's model state are subtracted. None = unlimited.
    micro_batches
        Per iteration; must divide every batch size.
    recompute_mode
        As in `JobArray`; the times and bytes of recomputation are always filled in.
    recompute_workspace
        Whether a recomputing block needs room for the stage's activations while it runs.
    update, switch
        Whether optimizer steps and job switches take time.
    place
        Device of every stage, such as `optsched.pipelines.wrapped` gives. Stages of one device
        need no communication and share its memory; a switch moves the state of all of them.
    split_backward
        Input gradients and weight gradients as blocks of their own, each as long as the forward
        pass; bytes stay until the weight gradient as `Layer.weight_bytes` says.
    prefetch
        ``"slack"``: entering a job on a device costs what loading its model state from the host
        takes longer than the shortest block of any other job there, behind which it is loaded.

    Returns
    -------
    dict
        Arrays of shape (n_jobs, stages) in whole microseconds and bytes, and the labels.

    Raises
    ------
    InputError
        Naming the argument, the value and the legal range.
    """
    profile = model if isinstance(model, Model) else model_of(model)
    layers = len(profile.layers)
    if isinstance(stages, int) and stages > layers:
        raise InputError(
            f"stages: expected an integer in 1..{layers}, got {format_value(stages)}; each holds "
            "a layer "
            f"of {profile.name}, which has {layers}"
        )
    integer("stages", stages, 1, layers)
    sizes = _samples(batch_sizes, micro_batches)
    parts = stages_of(profile, stages, _second(sizes), partition)
    placed = place_of(place, np.ones(1, np.int64), stages)
    if not isinstance(placed[0], int):
        raise InputError("place: expected one device per stage")
    devices = flat(placed)
    servers = _servers(link, 1 + max(devices))
    bandwidth = _bandwidths(link, devices, servers)
    per_job, none = len(sizes), np.zeros((len(sizes), stages), np.int64)

    def table(value: Callable[[Stage, int], Fraction | int]) -> IntArray:
        return _table([[value(part, size) for part in parts] for size in sizes])

    forward = table(lambda s, b: _forward(s, profile, b))
    kept = table(lambda s, b: b * s.kept_bytes)
    lag = _table([
        [b * s.out_bytes / Fraction(w) + LATENCY if w else 0
         for s, w in zip(parts[:-1], bandwidth, strict=True)]
        for b in sizes
    ])  # fmt: skip
    state = np.zeros(len(servers), np.int64)
    np.add.at(state, devices, [s.state for s in parts])
    moved = [ceil(Fraction(int(state[d]), SWITCH)) for d in devices]
    switches = np.array([moved] * per_job, np.int64) if switch else none
    if prefetch == "slack":
        switches = switches + _exposed(state, devices, forward)
    elif prefetch != "none":
        raise InputError(f"prefetch: expected none or slack, got {format_value(prefetch)}")
    split: dict[str, Any] = {}
    if split_backward:
        split["weight"] = forward
        split["weight_memory"] = _weight_memory(sizes, parts, recompute_mode)
    gradients = 1 if split_backward else 2
    step = Fraction(UPDATE_BYTES, HBM) if update else 0
    return {
        "name": f"{profile.name}-{per_job}x{stages}",
        "time_unit": "us",
        "forward": forward,
        "backward": table(lambda s, b: gradients * _forward(s, profile, b)),
        **split,
        "recompute": forward,
        "update": table(lambda s, _: step * s.params),
        "switch": switches,
        "switch_on": "out" if prefetch == "none" else "in",
        "lag_forward": lag,
        "lag_backward": lag,
        "activation": kept,
        "checkpoint": table(lambda s, b: b * s.in_bytes),
        "recompute_workspace": kept if recompute_workspace else none,
        "state": table(lambda s, _: s.state),
        "micro_batches": np.full(per_job, micro_batches, np.int64),
        "batch_size": np.array([b * micro_batches for b in sizes], np.int64),
        "memory": _left(memory, state.tolist()),
        "servers": servers,
        "place": placed,
        "recompute_mode": recompute_mode,
    }


def forward_time(layer: Layer, model: Model, batch: int) -> Fraction:
    """Time of a layer's forward pass, in microseconds, exact."""
    compute = layer.flops * (batch + model.half_batch) / FLOPS
    traffic = Fraction(3 * batch * layer.out_bytes, HBM)
    return max(compute, traffic) + LAUNCH


def stages_of(model: Model, stages: int, batch: int, partition: str = "balanced") -> list[Stage]:
    """Cut the model into stages.

    Parameters
    ----------
    model, stages, partition
        As in `job_array_fields`.
    batch
        Samples per micro-batch at which ``"balanced"`` compares stages.
    """
    if partition == "naive":
        cuts = naive(len(model.layers), stages)
    elif partition == "balanced":  # nanoseconds: integers, and fine enough
        costs = [ceil(1000 * forward_time(layer, model, batch)) for layer in model.layers]
        cuts = balanced(costs, stages)
    else:
        raise InputError(f"partition: expected balanced or naive, got {format_value(partition)}")
    parts, incoming = [], model.input_bytes
    for v in range(stages):
        layers = model.layers[cuts[v] : cuts[v + 1]]
        # a tied matrix is there already where its owner, the first layer, is
        copies = sum(layer.tied_params for layer in layers) if v else 0
        params = sum(layer.params for layer in layers) + copies
        kept = sum(layer.kept_bytes for layer in layers)
        until_weight = sum(layer.weight_bytes for layer in layers)
        outgoing = layers[-1].out_bytes
        state = model.state_bytes * params
        parts.append(Stage(layers, params, state, incoming, outgoing, kept, until_weight))
        incoming = outgoing
    return parts


def bytes_of(memory: str | int) -> int:
    """Bytes of a device: an integer, also as text, or ``"80GB"`` (GB and GiB are 2^30 here)."""
    if not isinstance(memory, str):
        return integer("memory", memory, 1, MAX_INTEGER)
    match = re.fullmatch(r"([0-9]{1,20})(?: ?(GB|GiB|MB|MiB))?", memory, re.ASCII)
    if not match or int(match[1]) == 0:
        raise InputError(
            f'memory: expected bytes or a size such as "80GB", got {format_value(memory)}'
        )
    power = {None: 0, "M": 20, "G": 30}[match[2] and match[2][0]]
    return integer("memory", int(match[1]) << power, 1, MAX_INTEGER)


def _forward(stage: Stage, model: Model, batch: int) -> Fraction:
    return sum((forward_time(layer, model, batch) for layer in stage.layers), Fraction(0))


def _table(rows: Sequence[Sequence[Fraction | int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Whole numbers, rounded up; shape (n_jobs, columns) also if there are no columns."""
    whole = [[ceil(value) for value in row] for row in rows]
    largest = max((value for row in whole for value in row), default=0)
    if largest > MAX_INTEGER:
        raise InputError(f"batch_sizes: a block needs {largest} microseconds or bytes, above 2^53")
    return np.array(whole, np.int64).reshape(len(whole), len(whole[0]))


def _exposed(state: IntArray, devices: Sequence[int], forward: IntArray) -> IntArray:
    """Part of loading a device's state that the shortest block of other jobs there cannot hide.

    No block is shorter than a forward pass here; shape (n_jobs, stages).
    """
    found = np.zeros_like(forward)
    for v, d in enumerate(devices):
        load = ceil(Fraction(int(state[d]), HOST))
        shortest = forward[:, [w for w, other in enumerate(devices) if other == d]].min(axis=1)
        for j in range(len(forward)):
            others = np.delete(shortest, j)
            if len(others):
                found[j, v] = max(0, load - int(others.min()))
    return found


def _samples(batch_sizes: Sequence[int], micro_batches: int) -> list[int]:
    """Samples per micro-batch of every job."""
    integer("micro_batches", micro_batches, 1, MAX_INTEGER)
    if isinstance(batch_sizes, (str, bytes)) or not hasattr(batch_sizes, "__len__"):
        raise InputError(
            f"batch_sizes: expected a list of integers, got {format_value(batch_sizes)}"
        )
    if len(batch_sizes) == 0:
        raise InputError("batch_sizes: expected at least one job, got none")
    sizes = [integer(f"batch_sizes[{j}]", b, 1, MAX_INTEGER) for j, b in enumerate(batch_sizes)]
    for j, size in enumerate(sizes):
        if size % micro_batches:
            raise InputError(
                f"batch_sizes[{j}]: {size} is no multiple of {micro_batches} micro-batches"
            )
    return [size // micro_batches for size in sizes]


def _second(sizes: Sequence[int]) -> int:
    distinct = sorted(set(sizes))
    return distinct[min(1, len(distinct) - 1)]


def _bandwidths(link: str, devices: Sequence[int], servers: Sequence[str]) -> list[int]:
    """Bytes per microsecond over every cut, 0 within a device; shape (stages - 1,)."""
    if link != "mixed" and link not in BANDWIDTH:
        raise InputError(
            f"link: expected one of {', '.join(BANDWIDTH)}, mixed, got {format_value(link)}"
        )
    found = []
    for one, two in pairwise(devices):
        kind = link
        if link == "mixed":
            kind = "nvlink" if servers[one] == servers[two] else "infiniband"
        found.append(0 if one == two else BANDWIDTH[kind])
    return found


def _servers(link: str, devices: int) -> tuple[str, ...]:
    """Which server a device is in: InfiniBand is what leaves a server."""
    per_server = {"mixed": 4, "infiniband": 1}.get(link, devices)
    return tuple(f"server{d // per_server}" for d in range(devices))


def _weight_memory(
    sizes: Sequence[int], parts: Sequence[Stage], recompute_mode: str | Sequence[bool]
) -> IntArray:
    """Bytes kept until the weight gradient; no more than what F has kept."""
    rows = []
    for j, b in enumerate(sizes):
        chosen = recompute_mode if isinstance(recompute_mode, str) else recompute_mode[j]
        kept = [
            s.kept_bytes if chosen in ("never", False)
            else s.in_bytes if chosen in ("always", True)
            else min(s.kept_bytes, s.in_bytes)
            for s in parts
        ]  # fmt: skip
        rows.append([b * min(s.weight_bytes, k) for s, k in zip(parts, kept, strict=True)])
    return _table(rows)


def _left(memory: str | int | None, states: Sequence[int]) -> list[int]:
    """Bytes left for activations on every device; 0 = unlimited."""
    if memory is None:
        return [0] * len(states)
    there = bytes_of(memory)
    for d, state in enumerate(states):
        if 2 * state >= there:  # 0 left would read as unlimited
            raise InputError(
                f"memory: {there} bytes leave nothing for activations on device {d}, "
                f"two buffers of its model state take {2 * state}"
            )
    return [there - 2 * state for state in states]
