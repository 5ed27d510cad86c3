"""States in slots on a virtual clock: how much of the copies is hidden.

    python -m benchmarks.executor.memory_engine

One stage of eight of GPT-2 XL in bf16 with AdamW in fp32, 16 jobs on one device, PCIe 5; efficiency
= compute / total. All of it is arithmetic.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.machine import machine
from optsched.arraypipe.memory.budget import Access, most_slots
from optsched.arraypipe.memory.transfers import IN, LEAST_CHUNK, OUT, CopyEngine, Transfers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PARAMETERS = 1_557_611_200 // 8  # of a stage
TOKENS = 8 * 1024  # of an iteration
PCIE_5 = 55e9
LATENCY_NS = 10e3


class SimulatedEngine(CopyEngine):
    """Virtual clock: blocks and copies take predicted times, by bytes per second and latency."""

    def __init__(self, inward: float, outward: float, latency_ns: float = 0.0) -> None:
        super().__init__()
        self.latency_ns, self.bandwidth = latency_ns, {IN: inward, OUT: outward}
        self.free_ns = {IN: 0.0, OUT: 0.0}  # when the last copy of a direction ends
        self.now_ns = 0.0  # when the last block ends
        # direction, piece, slot, state, first byte, last byte, start, end
        self.queued: list[tuple[str, int, int, int, int, int, float, float]] = []

    def copy(
        self,
        direction: str,
        size: int,
        action: Any,
        after: Iterable[float | None],
        label: Any = None,
    ) -> float:
        """Do the copy; the time at which it would end."""
        action()
        begin_ns = max([self.free_ns[direction], *(t for t in after if t is not None)])
        begin_ns += self.latency_ns
        end_ns = self.free_ns[direction] = begin_ns + size * 1e9 / self.bandwidth[direction]
        self.queued.append((*action.args, begin_ns, end_ns))
        return end_ns

    def wait(self, events: Iterable[float | None]) -> None:
        """Move the clock to the last of the events."""
        self.now_ns = max([self.now_ns, *(t for t in events if t is not None)])

    def block(self, duration_ns: float) -> None:
        """Let a block run."""
        self.now_ns += duration_ns

    def ran(self) -> float:
        """When the last block ends."""
        return self.now_ns

    def finish(self) -> None:
        """Wait for all copies."""
        self.wait(self.free_ns.values())


class Simulated(Transfers):
    """Slots of which only is known how many bytes every state has, by piece."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        slots: Sequence[int],
        horizon: int,
        engine: CopyEngine,
        least_chunk: int = LEAST_CHUNK,
    ) -> None:
        sizes = [max(row[piece] for row in rows) for piece in (0, 1)]
        super().__init__(slots, sizes, horizon, engine, least_chunk)
        self.rows = rows

    def size(self, state: int, piece: int) -> int:
        """Of a piece."""
        return self.rows[state][piece]


class Cycle(NamedTuple):
    """A cycle: how long it takes, and bytes copied."""

    time_ns: float
    inward: float
    outward: float


def simulate(
    rows: Sequence[tuple[int, int]],
    accesses: Sequence[Access],
    durations_ns: Sequence[float],
    slots: tuple[int, int],
    bandwidth: float,
    latency_ns: float = 0.0,
    least_chunk: int = LEAST_CHUNK,
) -> Cycle:
    """The mean of the later 20 of 40 cycles, from empty slots."""
    engine, cycles = SimulatedEngine(bandwidth, bandwidth, latency_ns), 40
    horizon = 2 * len(accesses) + 1
    transfers = Simulated(rows, slots, horizon, engine, least_chunk)
    transfers.announce(islice(cycle(accesses), cycles * len(accesses) + horizon))
    middle_ns, middle = 0.0, 0
    for k in range(cycles):
        if k == cycles // 2:
            middle_ns, middle = engine.now_ns, len(engine.queued)
        for access, duration_ns in zip(accesses, durations_ns, strict=True):
            transfers.take(access)
            engine.block(duration_ns)
            transfers.release()
    late = engine.queued[middle:]
    inward, outward = (sum(row[5] - row[4] for row in late if row[0] == way) for way in (IN, OUT))
    half = cycles - cycles // 2
    return Cycle((engine.now_ns - middle_ns) / half, inward / half, outward / half)


def orders(jobs: int) -> dict[str, list[tuple[str, int]]]:
    """Three ways to repeat the blocks of a device."""
    row = range(jobs)
    return {
        "all F, all B": [("F", j) for j in row] + [("B", j) for j in row],
        "B four jobs later": [x for j in row for x in (("F", j), ("B", (j - 4) % jobs))],
        "B, next F": [x for j in row for x in (("B", j), ("F", j))],
    }


def main() -> None:
    """Efficiency with the bytes of 1 to 4 states, at the speed of a current GPU and at a tenth."""
    jobs, pieces = 16, (2 * PARAMETERS, 12 * PARAMETERS)
    print(machine(), end="\n\n")
    print("| TFLOP/s | order | bytes of | slots | whole states | pieces | copied in, GB |")
    print("|---|---|---|---|---|---|---|")
    for speed in (400, 40):
        work_ns = 1e9 * PARAMETERS * TOKENS / (speed * 1e12)
        for name, order in orders(jobs).items():
            accesses, times, whole = [], [], []
            for i, (kind, j) in enumerate(order):  # backward with recompute
                accesses.append(Access(j, kind, operation=i))
                times.append(2 * work_ns if kind == "F" else 6 * work_ns)
                whole.append(Access(j, "U", operation=i))
                if kind == "B":
                    accesses.append(Access(j, "U", operation=i))
                    times.append(0.0)
            blocks = [t for t in times if t]
            for n in (1, 2, 4):
                slots = most_slots(jobs, pieces, n * sum(pieces))
                split = simulate([pieces] * jobs, accesses, times, slots, PCIE_5, LATENCY_NS)
                one = simulate([(sum(pieces), 0)] * jobs, whole, blocks, (n, 1), PCIE_5, LATENCY_NS)
                compute = sum(times)
                print(
                    f"| {speed} | {name} | {n} states | {slots[0]} + {slots[1]} "
                    f"| {compute / one.time_ns:.2f} | {compute / split.time_ns:.2f} "
                    f"| {split.inward / 1e9:.1f} |"
                )


if __name__ == "__main__":
    main()
