"""Messages between stages, the channels they travel on, and the order of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optsched.arraypipe.plan.checks import Block
    from optsched.arraypipe.plan.plan import ExecutionPlan


KINDS: Final = ("activation", "gradient", "tied", "weight", "factor")


class Message(NamedTuple):
    """What one block makes and another takes, both in the same iteration of their job.

    ``"activation"`` F(s) to F(s+1), ``"gradient"`` B(s+1) to B(s), ``"tied"`` the gradient of a
    borrowed weight from B(user) to B(lender) (if summed, from the last of the one to the last of
    the other), ``"weight"`` its value from the lender's first F to the user's, ``"factor"`` (the
    norm of all gradients) from the last B(0) to U(s). First and last are those that are run first
    and last. All of them follow from the chain of the blocks, so they add no precedence.
    """

    kind: str
    producer: int
    consumer: int


class Channel(NamedTuple):
    """Messages of one kind from one device to another, in the order in which they are consumed."""

    source: int
    target: int
    kind: str
    messages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Routes:
    """All messages of a plan.

    Parameters
    ----------
    messages
        One per cycle each.
    inputs, outputs
        Messages by consuming and by producing operation.
    channels
        Those between different devices.
    channel_of
        Channel of every message, -1 if it stays on its device.
    summed
        Gradients of tied weights are summed over the micro-batches before they are sent.
    """

    messages: tuple[Message, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    channels: tuple[Channel, ...]
    channel_of: tuple[int, ...]
    summed: bool = False


def routes(
    plan: ExecutionPlan,
    ties: Sequence[tuple[int, int]] = (),
    together: Collection[int] = (),
    summed: bool = False,
) -> Routes:
    """The messages of a plan.

    Parameters
    ----------
    ties
        Pairs (stage, next stage that uses one of its weights), the same for all jobs.
    together
        Jobs whose updates wait for the gradients of all stages (they need update blocks).
    summed
        Send the gradient of a tied weight once an iteration, not with every micro-batch.
    """
    for job in together:
        if job not in plan.updated:
            raise InputError(f"job {job}: its updates must be blocks of their own")
    messages = tuple(_messages(plan, ties, together, summed))
    inputs: list[list[int]] = [[] for _ in plan.blocks]
    outputs: list[list[int]] = [[] for _ in plan.blocks]
    place = {i: k for row in plan.sequences for k, i in enumerate(row)}
    by_channel: dict[tuple[int, int, str], list[int]] = {}
    for k, message in enumerate(messages):
        inputs[message.consumer].append(k)
        outputs[message.producer].append(k)
        source, target = (plan.blocks[i].device for i in (message.producer, message.consumer))
        if source != target:
            by_channel.setdefault((source, target, message.kind), []).append(k)
    channels: list[Channel] = []
    channel_of = [-1] * len(messages)
    for key in sorted(by_channel):
        row = sorted(by_channel[key], key=lambda k: (place[messages[k].consumer], k))
        for k in row:
            channel_of[k] = len(channels)
        channels.append(Channel(*key, tuple(row)))
    return Routes(
        messages, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), tuple(channels),
        tuple(channel_of), summed,
    )  # fmt: skip


def _messages(
    plan: ExecutionPlan,
    ties: Sequence[tuple[int, int]],
    together: Collection[int],
    summed: bool,
) -> Iterator[Message]:
    at = {(b.kind, b.job, b.stage, b.microbatch, b.copy): b.operation for b in plan.blocks}
    last, order = plan.n_stages - 1, plan.micro_order
    for block in plan.blocks:
        kind, j, s, m, a = block[1:6]
        i = block.operation
        ends = i in order.last_backwards
        if i in order.first_forwards:
            for lender, user in ties:
                if lender == s:
                    yield Message("weight", i, order.first_forward[j, user, a])
        if kind == "F" and s < last:
            yield Message("activation", i, at["F", j, s + 1, m, a])
        if kind == "B":
            if s > 0:
                yield Message("gradient", i, at["B", j, s - 1, m, a])
            for lender, user in ties if ends or not summed else ():
                if user == s:
                    taker = (
                        order.last_backward[j, lender, a] if summed else at["B", j, lender, m, a]
                    )
                    yield Message("tied", i, taker)
            if s == 0 and j in together and ends:
                for other in range(1, plan.n_stages):
                    yield Message("factor", i, at["U", j, other, 0, a])


Place = tuple[int, int, int]
"""Job, stage, copy."""


class MicroOrder(NamedTuple):
    """What follows from the orders of the devices; ascending micro-batches are a special case.

    Parameters
    ----------
    following
        Of a forward or backward block, the next one of its kind, job, stage and copy.
    first_forward, last_backward
        The operation that begins an iteration of a job on a stage, and the backward that ends it.
    first_forwards, last_backwards
        The same operations as sets.
    """

    following: dict[int, int]
    first_forward: dict[Place, int]
    last_backward: dict[Place, int]
    first_forwards: frozenset[int]
    last_backwards: frozenset[int]


def micro_order(blocks: Sequence[Block], sequences: Sequence[Sequence[int]]) -> MicroOrder:
    """Read the orders; within one iteration what has the smaller offset runs earlier."""
    groups: dict[tuple[str, int, int, int], list[int]] = {}
    for row in sequences:
        for i in row:
            b = blocks[i]
            if b.kind in ("F", "B"):
                groups.setdefault((b.kind, b.job, b.stage, b.copy), []).append(i)
    following: dict[int, int] = {}
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for (kind, job, stage, copy), group in groups.items():
        group.sort(key=lambda i: blocks[i].offset)  # stable: the order of the device within a cycle
        following.update(pairwise(group))
        if kind == "F":
            first[job, stage, copy] = group[0]
        else:
            last[job, stage, copy] = group[-1]
    return MicroOrder(following, first, last, frozenset(first.values()), frozenset(last.values()))
