"""How many feasible schedules hang, by the order in which messages travel between devices.

One iteration of a random feasible schedule is run on one device per stage. ``blocking``: a block
ends when its messages have been received, and messages between two devices are told apart by
nothing but their order (the released ArrayPipe code). ``sender``: they are sent when they are made,
and a receiver holds up to w that it has not consumed. ``receiver``: they travel in the order in
which the receiver consumes them (`optsched.arraypipe.distributed.protocol`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from optsched.arraypipe import compile, random_schedule
from optsched.arraypipe.distributed.protocol import DevicePort
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.plan.segments import Segment, device_stream
from optsched.arraypipe.plan.types import Instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = ((4, 2), (8, 8), (30, 8))
Pair = tuple[int, int]


def share_that_hangs(
    n_jobs: int, n_stages: int, n_schedules: int, hangs: Callable[[Segment], bool]
) -> float:
    """Share of random feasible schedules that hang; the seeds are 0, 1, 2, ..."""
    found = 0
    for seed in range(n_schedules):
        plan = compile(random_schedule([1] * n_jobs, n_stages, seed=seed))
        jobs = range(n_jobs)
        segment = Segment(plan, routes(plan), tuple(jobs), [0 for _ in jobs], [1 for _ in jobs])
        found += hangs(segment)
    return found / n_schedules


def blocking(segment: Segment) -> bool:
    """Whether it hangs if sends and receives wait for each other."""
    devices = range(len(segment.plan.devices))
    scripts = [_script(segment, d) for d in devices]
    at = [next(script, None) for script in scripts]
    moved = True
    while moved:
        moved = False
        for d in devices:
            here = at[d]
            if here is None or here[0] != "send":
                continue
            there = at[here[1]]
            if there is not None and there == ("receive", d, here[2]):
                at[d], at[here[1]] = next(scripts[d], None), next(scripts[here[1]], None)
                moved = True
    return any(step is not None for step in at)


def _script(segment: Segment, device: int) -> Iterator[tuple[str, int, int]]:
    """What a device waits for, one after the other: (send or receive, other device, message)."""
    plan, paths = segment.plan, segment.routes
    for operation, _, _ in device_stream(segment, device):
        for k in paths.inputs[operation]:
            if paths.channel_of[k] >= 0:
                yield "receive", plan.blocks[paths.messages[k].producer].device, k
        for k in paths.outputs[operation]:
            if paths.channel_of[k] >= 0:
                yield "send", plan.blocks[paths.messages[k].consumer].device, k


def sender_order(window: int) -> Callable[[Segment], bool]:
    """Whether it hangs if messages travel in the order in which they are made."""

    def hangs(segment: Segment) -> bool:
        paths = segment.routes
        sent: dict[int, deque[int]] = defaultdict(deque)
        held: dict[int, set[int]] = defaultdict(set)

        def ready(operation: int) -> bool:
            for k in paths.inputs[operation]:
                channel = paths.channel_of[k]
                while channel >= 0 and sent[channel] and len(held[channel]) < window:
                    held[channel].add(sent[channel].popleft())
                if channel >= 0 and k not in held[channel]:
                    return False
            for k in paths.inputs[operation]:
                held[paths.channel_of[k]].discard(k)
            return True

        def ended(operation: int) -> None:
            for k in paths.outputs[operation]:
                sent[paths.channel_of[k]].append(k)

        return _runs_dry(segment, lambda _, operation: ready(operation), lambda _, i: ended(i))

    return hangs


def receiver_order(window: int) -> Callable[[Segment], bool]:
    """Whether it hangs by the library's protocol."""

    def hangs(segment: Segment) -> bool:
        ports = [DevicePort(segment, d, window) for d in range(len(segment.plan.devices))]
        sent: dict[int, deque[int]] = defaultdict(deque)
        posted: dict[int, deque[int]] = defaultdict(deque)
        arrived: set[int] = set()

        def ready(device: int, operation: int) -> bool:
            for channel, transfer in ports[device].post(0):
                posted[channel].append(transfer.message)
            for channel in ports[device].receivers:
                while sent[channel] and posted[channel]:
                    k = sent[channel].popleft()
                    assert k == posted[channel].popleft()
                    arrived.add(k)
            paths = segment.routes
            return all(k in arrived or paths.channel_of[k] < 0 for k in paths.inputs[operation])

        def ended(device: int, operation: int) -> None:
            ports[device].ended(Instance(operation, 0, 0))
            for channel, transfer in ports[device].send():
                sent[channel].append(transfer.message)

        return _runs_dry(segment, ready, ended)

    return hangs


def _runs_dry(
    segment: Segment, ready: Callable[[int, int], bool], ended: Callable[[int, int], None]
) -> bool:
    """Whether the devices come to a halt before their lists are done."""
    at = [0] * len(segment.plan.devices)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(segment.plan.sequences):
            while at[device] < len(row) and ready(device, row[at[device]]):
                ended(device, row[at[device]])
                at[device] += 1
                moved = True
    return any(n < len(row) for n, row in zip(at, segment.plan.sequences, strict=True))


PROTOCOLS: dict[str, Callable[[Segment], bool]] = {
    "blocking": blocking,
    "sender w=2": sender_order(2),
    "sender w=4": sender_order(4),
    "receiver w=1": receiver_order(1),
    "receiver w=2": receiver_order(2),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    n = parser.parse_args().schedules
    print(f"share of {n:,} feasible schedules that hang")
    print("| jobs, stages |" + "".join(f" {name} |" for name in PROTOCOLS))
    print("|---|" + "---|" * len(PROTOCOLS))
    for n_jobs, n_stages in SIZES:
        shares = [share_that_hangs(n_jobs, n_stages, n, hangs) for hangs in PROTOCOLS.values()]
        print(f"| {n_jobs}, {n_stages} |" + "".join(f" {x:.1%} |" for x in shares), flush=True)


if __name__ == "__main__":
    main()
