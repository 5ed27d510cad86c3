"""Random rolling plans, and a model of devices with channels that runs them at any speed.

A message crosses when its sender has sent it and its receiver has posted a receive, in the order of
the channel at both ends. What happens next is drawn at random; some actors are very slow.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe import compile_plan
from optsched.arraypipe.distributed.channels import ReceiveOrder
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.plan.segments import Segment, device_stream
from optsched.arraypipe.plan.types import Instance, Transfer
from optsched.model.schedule import Resource, Rows, Schedule

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

PERIOD = 10**6
SLOWNESS = (1.0, 1.0, 1.0, 0.1, 0.001)


class Shape(NamedTuple):
    """What stays the same when the plan of a run changes."""

    n_stages: int
    n_devices: int
    microbatches: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]  # device of every stage, per job
    recomputed: tuple[bool, ...]
    updated: tuple[bool, ...]
    together: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]


def random_shape(draw: random.Random, *, everywhere: bool = False) -> Shape:
    """2 to 8 devices and a few jobs; with `everywhere` all jobs have a stage on every device."""
    n_devices = draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 7, 8])
    n_stages = n_devices + draw.choice([0, 0, 1, 2])
    n_jobs = draw.randint(1, max(2, 7 - n_devices))
    places = []
    for _ in range(n_jobs):
        place = [draw.randrange(n_devices) for _ in range(n_stages)]
        if everywhere or draw.random() < 0.5:
            place[:n_devices] = range(n_devices)
        if draw.random() < 0.5:
            draw.shuffle(place)
        places.append(tuple(place))
    updated = tuple(draw.random() < 0.4 for _ in range(n_jobs))
    pairs = [sorted(draw.sample(range(n_stages), 2)) for _ in range(draw.choice([0, 0, 1, 2]))]
    return Shape(
        n_stages=n_stages,
        n_devices=n_devices,
        microbatches=tuple(draw.choice([1, 1, 1, 2]) for _ in range(n_jobs)),
        places=tuple(places),
        recomputed=tuple(draw.random() < 0.3 for _ in range(n_jobs)),
        updated=updated,
        together=tuple(j for j in range(n_jobs) if updated[j] and draw.random() < 0.6),
        ties=tuple(sorted({(a, b) for a, b in pairs})),
    )


def random_rolling(shape: Shape, draw: random.Random) -> Schedule:
    """A feasible periodic schedule with offsets and copies, otherwise arbitrary.

    All blocks of one cycle of a job get random times within one period, in an order that its
    dependencies allow; the job starts anywhere in the first cycles. So every block comes after all
    that it waits for, and the last update before the next cycle's first forward.
    """
    labels: list[tuple[str, int, int, int, int]] = []
    times: list[int] = []
    for job in range(len(shape.microbatches)):
        begin = draw.randrange(3 * PERIOD) if draw.random() < 0.5 else draw.randrange(PERIOD)
        row = list(_random_chain(shape, job, draw.choice([1, 1, 1, 2]), draw))
        labels += row
        times += [begin + t for t in sorted(draw.sample(range(PERIOD), len(row)))]
    kind, job_of, stage, microbatch, iteration = zip(*labels, strict=True)
    place = [shape.places[j][s] for j, s in zip(job_of, stage, strict=True)]
    sequences: list[list[int]] = [[] for _ in range(shape.n_devices)]
    for i in sorted(range(len(labels)), key=lambda i: times[i] % PERIOD):
        sequences[place[i]].append(i)
    return Schedule(
        resources=tuple(Resource(f"device{d}") for d in range(shape.n_devices)),
        duration=[1] * len(labels),  # type: ignore[arg-type]
        op_resources=Rows.of([[d] for d in place]),
        kind=kind, job=job_of, stage=stage, microbatch=microbatch, iteration=iteration,  # type: ignore[arg-type]
        offset=[t // PERIOD for t in times],  # type: ignore[arg-type]
        start=[t % PERIOD for t in times],  # type: ignore[arg-type]
        period=PERIOD,
        sequences=Rows.of(sequences),
    )  # fmt: skip


def _random_chain(
    shape: Shape, job: int, copies: int, draw: random.Random
) -> Iterator[tuple[str, int, int, int, int]]:
    """Labels of all blocks of one job in a random order that is allowed."""
    micro, last = shape.microbatches[job], shape.n_stages - 1
    waits: dict[tuple[str, int, int, int, int], list[tuple[str, int, int, int, int]]] = {}
    for a in range(copies):
        for s in range(shape.n_stages):
            ends = ("U", job, s, 0, a) if shape.updated[job] else ("B", job, s, micro - 1, a)
            for m in range(micro):
                f, b, r = (("F", job, s, m, a), ("B", job, s, m, a), ("R", job, s, m, a))
                before = [("F", job, s - 1, m, a)] * (s > 0) + [("F", job, s, m - 1, a)] * (m > 0)
                if m == 0 and a > 0:
                    before.append((*ends[:4], a - 1))
                waits[f] = before
                waits[b] = [f] + [("B", job, s + 1, m, a)] * (s < last)
                waits[b] += [("B", job, s, m - 1, a)] * (m > 0)
                if shape.recomputed[job]:
                    waits[r] = [f]
                    waits[b].append(r)
            if shape.updated[job]:
                waits[ends] = [("B", job, s, micro - 1, a)]
                if job in shape.together:
                    waits[ends].append(("B", job, 0, micro - 1, a))
    left = {label: len(before) for label, before in waits.items()}
    after = defaultdict(list)
    for label, before in waits.items():
        for other in before:
            after[other].append(label)
    ready = [label for label, n in left.items() if not n]
    while ready:
        label = ready.pop(draw.randrange(len(ready)))
        yield label
        for other in after[label]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)


def segment_of(shape: Shape, draw: random.Random, first: Sequence[int], most: int) -> Segment:
    """A random plan of this shape, with up to `most` cycles of every job."""
    plan = compile_plan(random_rolling(shape, draw))
    return Segment(
        plan=plan,
        routes=routes(plan, shape.ties, shape.together),
        slots=tuple(range(plan.n_jobs)),
        first=list(first),
        count=[draw.randint(0, most * r) for r in plan.copies],
    )


class Hang(AssertionError):
    """Nothing can happen any more, and not everything has happened."""


class Model:
    """Devices that run a segment; `ran` has the blocks of each in its order."""

    def __init__(self, segment: Segment, windows: Sequence[int], draw: random.Random) -> None:
        self.segment, self.draw = segment, draw
        rows, devices = segment.routes.channels, range(len(segment.plan.sequences))
        self.orders = [ReceiveOrder(segment, k, window) for k, window in enumerate(windows)]
        self.sent: list[list[Transfer]] = [[] for _ in rows]  # not yet received
        self.posted: list[list[Transfer]] = [order.ahead() for order in self.orders]
        self.arrived: set[Transfer] = set()
        self.ran: list[list[Instance]] = [[] for _ in devices]
        self.streams = [device_stream(segment, d) for d in devices]
        self.now = [next(stream, None) for stream in self.streams]
        self.speed = [draw.choice(SLOWNESS) for _ in (*devices, *rows)]
        self.most_posted = 0

    def run(self) -> None:
        """Let everything happen; `Hang` if it cannot."""
        n = len(self.now)
        while True:
            may = [d for d in range(n) if self.now[d] is not None and self._is_ready(d)]
            may += [n + k for k, row in enumerate(self.sent) if row and self.posted[k]]
            if not may:
                break
            (actor,) = self.draw.choices(may, [self.speed[a] for a in may])
            if actor < n:
                self._block(actor)
            else:
                self._cross(actor - n)
        if any(now is not None for now in self.now) or any(self.sent) or any(self.posted):
            raise Hang(f"{self.now}")

    def _is_ready(self, device: int) -> bool:
        """Post what the next block needs; whether all of it is there."""
        now = self.now[device]
        assert now is not None
        for k in self.segment.routes.inputs[now.operation]:
            channel, transfer = self.segment.routes.channel_of[k], Transfer(k, now.iteration)
            if channel >= 0 and transfer not in self.arrived:
                self.posted[channel] += self.orders[channel].until(transfer)
                return False  # a device waits for one message after the other
        return True

    def _block(self, device: int) -> None:
        now, routes_ = self.now[device], self.segment.routes
        assert now is not None
        for k in routes_.inputs[now.operation]:
            if (channel := routes_.channel_of[k]) >= 0:
                transfer = Transfer(k, now.iteration)
                self.arrived.remove(transfer)
                self.orders[channel].posted.discard(transfer)
                self.posted[channel] += self.orders[channel].ahead()
        for k in routes_.outputs[now.operation]:
            if (channel := routes_.channel_of[k]) >= 0:
                self.sent[channel].append(Transfer(k, now.iteration))
        self.ran[device].append(now)
        self.now[device] = next(self.streams[device], None)

    def _cross(self, channel: int) -> None:
        sent, posted = self.sent[channel].pop(0), self.posted[channel].pop(0)
        assert sent == posted, "a channel mixes messages up"
        self.arrived.add(sent)
