"""An analytic cost model: block times and bytes of four real models on A100 devices.

Per layer at batch size b: forward = max(flops (b + b_half) / (0.45 peak), 3 b out_bytes / hbm)
+ 60 us; backward = 2 forward; recomputation = forward; update = 16 bytes a parameter / hbm;
communication = b boundary / bandwidth + 15 us; job switch = state / (150 GB/s). All in exact
fractions, rounded up to whole microseconds per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import bytes_of, format_value, integer
from optsched.pipelines.cuts import balanced, naive
from optsched.pipelines.models import Layer, Model, model_of
from optsched.problems.jobarray.checks import flat, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray

# an A100; rates per microsecond
FLOPS: Final = 156_000_000 * Fraction(45, 100)  # TF32 peak, the share of it that kernels reach
HBM: Final = 1_500_000  # bytes
SWITCH: Final = 150_000  # bytes of model state, from one buffer on the device to another
BANDWIDTH: Final = {"nvlink": 300_000, "pcie": 64_000, "infiniband": 50_000}
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


@dataclass(frozen=True)
class Options:
    """Keyword arguments of `job_array_fields`.

    Parameters
    ----------
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
        Whether a recomputing block needs memory for the stage's activations while it runs.
    update, switch
        Whether optimizer steps and job switches take time.
    place
        Device of every stage, such as `optsched.pipelines.wrapped` gives. Stages of one device
        need no communication and share its memory; a switch moves the state of all of them.
    split_backward
        Input gradients and weight gradients as blocks I and W, each as long as the forward pass;
        bytes stay until the weight gradient as `Layer.weight_bytes` says.
    """

    link: Link = "nvlink"
    partition: Literal["balanced", "naive"] = "balanced"
    memory: str | int | None = None
    micro_batches: int = 1
    recompute_mode: str | Sequence[bool] = "never"
    recompute_workspace: bool = False
    update: bool = True
    switch: bool = False
    place: Sequence[int] | None = None
    split_backward: bool = False


def job_array_fields(
    model: str | Model, stages: int, batch_sizes: Sequence[int], **options: Any
) -> dict[str, Any]:
    """Keyword arguments of `optsched.JobArray` for sibling jobs of one model.

    Parameters
    ----------
    model
        ``"vgg19"``, ``"resnet152"``, ``"bert_large"``, ``"gpt2_xl"``, or a custom `Model`.
    stages
        Number of pipeline stages, one a device unless `place` says otherwise.
    batch_sizes
        Samples per iteration of every job; divided equally among its micro-batches.
    options
        Those of `Options`.

    Returns
    -------
    dict
        Arrays of shape (n_jobs, stages) in whole microseconds and bytes, and the labels.
    """
    given = Options(**options)
    profile = model if isinstance(model, Model) else model_of(model)
    layers = len(profile.layers)
    if isinstance(stages, int) and stages > layers:
        raise InputError(
            f"stages: expected an integer in 1..{layers}, got {format_value(stages)}; each holds "
            f"a layer of {profile.name}, which has {layers}"
        )
    integer("stages", stages, 1, layers)
    sizes = _samples(batch_sizes, given.micro_batches)
    distinct = sorted(set(sizes))
    parts = stages_of(profile, stages, distinct[min(1, len(distinct) - 1)], given.partition)
    placed = place_of(given.place, np.ones(1, np.int64), stages)
    if not isinstance(placed[0], int):
        raise InputError("place: expected one device per stage")
    servers = _servers(given.link, 1 + max(flat(placed)))
    return {
        "name": f"{profile.name}-{len(sizes)}x{stages}",
        "time_unit": "us",
        **_times(profile, parts, sizes, given),
        **_bytes(parts, sizes, given),
        **_placed(parts, sizes, flat(placed), servers, given),
        "micro_batches": np.full(len(sizes), given.micro_batches, np.int64),
        "batch_size": np.array([b * given.micro_batches for b in sizes], np.int64),
        "servers": servers,
        "place": placed,
        "recompute_mode": given.recompute_mode,
    }


def _times(
    model: Model, parts: Sequence[Stage], sizes: Sequence[int], given: Options
) -> dict[str, IntArray]:
    """Times of the blocks; shape (n_jobs, stages)."""
    forward = [[_forward(part, model, size) for part in parts] for size in sizes]
    step = Fraction(UPDATE_BYTES, HBM) if given.update else 0
    gradients = 1 if given.split_backward else 2
    found = {
        "forward": _table(forward),
        "backward": _table([[gradients * time for time in row] for row in forward]),
        "recompute": _table(forward),
        "update": _table([[step * part.params for part in parts]] * len(sizes)),
    }
    return found | ({"weight": found["forward"]} if given.split_backward else {})


def _bytes(parts: Sequence[Stage], sizes: Sequence[int], given: Options) -> dict[str, IntArray]:
    """Bytes of the stages; shape (n_jobs, stages)."""
    kept = _table([[size * part.kept_bytes for part in parts] for size in sizes])
    found = {
        "activation": kept,
        "checkpoint": _table([[size * part.in_bytes for part in parts] for size in sizes]),
        "recompute_workspace": kept if given.recompute_workspace else np.zeros_like(kept),
        "state": _table([[part.state for part in parts]] * len(sizes)),
    }
    if given.split_backward:
        found["weight_memory"] = _weight_memory(sizes, parts, given.recompute_mode)
    return found


def _placed(
    parts: Sequence[Stage],
    sizes: Sequence[int],
    devices: Sequence[int],
    servers: Sequence[str],
    given: Options,
) -> dict[str, Any]:
    """Lags, switches and memory, which depend on the devices of the stages."""
    bandwidth = _bandwidths(given.link, devices, servers)
    lag = _table([
        [b * s.out_bytes / Fraction(w) + LATENCY if w else 0
         for s, w in zip(parts[:-1], bandwidth, strict=True)]
        for b in sizes
    ])  # fmt: skip
    state = np.zeros(len(servers), np.int64)
    np.add.at(state, devices, [s.state for s in parts])
    moved = [ceil(Fraction(int(state[d]), SWITCH)) if given.switch else 0 for d in devices]
    return {
        "lag_forward": lag,
        "lag_backward": lag,
        "switch": np.array([moved] * len(sizes), np.int64),
        "memory": _left(given.memory, state.tolist()),
    }


def forward_time(layer: Layer, model: Model, batch: int) -> Fraction:
    """Compute the time of a layer's forward pass, in microseconds, exactly."""
    compute = layer.flops * (batch + model.half_batch) / FLOPS
    traffic = Fraction(3 * batch * layer.out_bytes, HBM)
    return max(compute, traffic) + LAUNCH


def stages_of(model: Model, stages: int, batch: int, partition: str = "balanced") -> list[Stage]:
    """Cut the model into stages; ``"balanced"`` for micro-batches of `batch` samples."""
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


def _forward(stage: Stage, model: Model, batch: int) -> Fraction:
    return sum((forward_time(layer, model, batch) for layer in stage.layers), Fraction(0))


def _table(rows: Sequence[Sequence[Fraction | int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Whole numbers, rounded up; shape (n_jobs, columns) also if there are no columns."""
    whole = [[ceil(value) for value in row] for row in rows]
    largest = max((value for row in whole for value in row), default=0)
    if largest > MAX_INTEGER:
        raise InputError(f"batch_sizes: a block needs {largest} microseconds or bytes, above 2^53")
    return np.array(whole, np.int64).reshape(len(whole), len(whole[0]))


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
    limit = bytes_of(memory)
    for d, state in enumerate(states):
        if 2 * state >= limit:  # 0 left would read as unlimited
            raise InputError(
                f"memory: {limit} bytes leave nothing for activations on device {d}, "
                f"two buffers of its model state take {2 * state}"
            )
    return [limit - 2 * state for state in states]
