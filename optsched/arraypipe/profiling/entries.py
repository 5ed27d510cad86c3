"""The entries of the document ``optsched.profile/1``."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from optsched.io.strict_json import MAX_INTEGER
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)

NOISY: Final = 0.25
"""IQR over median from which on a case is measured more often, and then warned about."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Precision: TypeAlias = Literal["fp64", "fp32", "bf16"]
Update: TypeAlias = Literal["fused", "block", "global"]


class DeviceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where and when it was measured; `memory_bytes` 0 = not known."""

    name: Text
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count = 0
    threads: Positive
    torch: Text
    date: Text
    optsched: Text


class StageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes of a stage; `state` per job: parameters, moments of the optimizer and buffers."""

    name: Text
    parameters_bytes: Count
    gradients_bytes: Count
    state: dict[str, Count]


class ProfiledJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job that was profiled.

    `optimizer` is its class and the settings that change its cost; jobs with the same one share
    the times of their updates.
    """

    name: Text
    batch_size: Positive
    microbatches: Positive = 1
    recompute: bool = False
    precision: Precision = "fp32"
    optimizer: str = ""
    update: Update = "fused"

    @property
    def batch(self) -> int:
        """Size of its largest micro-batch."""
        return -(-self.batch_size // self.microbatches)


class BlockEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times of one block in nanoseconds; `batch` is the micro-batch size.

    `job` is -1; for U the first job with that optimizer, and `batch` is 0. `launch_ns` is what the
    host needs to launch it on a GPU, 0 on a CPU.
    """

    kind: Literal["F", "B", "R", "U"]
    stage: Count
    batch: Count
    job: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INTEGER)] = -1
    dtype: Precision
    n: Positive
    median_ns: Positive
    iqr_ns: Count
    minimum_ns: Count
    launch_ns: Count = 0

    @property
    def launch_bound(self) -> bool:
        """Whether the GPU may have waited for the host, so that the time is that of the launch."""
        return 1.3 * self.launch_ns > self.median_ns

    @property
    def noisy(self) -> bool:
        """Whether the spread makes the median doubtful."""
        return self.iqr_ns > NOISY * self.median_ns


class BoundaryEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes that leave a stage: its output, and the gradient that comes back for it."""

    stage: Count
    batch: Positive
    dtype: Precision
    bytes: Count
    gradient_bytes: Count


class SavedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes kept from F to B: `bytes` without and `input_bytes` with recomputation."""

    stage: Count
    batch: Positive
    dtype: Precision
    bytes: Count
    input_bytes: Count


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A way that bytes go: bytes per second, and nanoseconds of an empty message."""

    bandwidth: Positive
    latency_ns: Count

    def time_ns(self, size: int) -> float:
        """Nanoseconds of a message of so many bytes."""
        return self.latency_ns + size * 1e9 / self.bandwidth


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From device to device, and from the host's memory to a device."""

    activation: Link
    host: Link


class Duration(NamedTuple):
    """A median in nanoseconds, and whether it was predicted from other sizes."""

    median_ns: int
    predicted: bool
