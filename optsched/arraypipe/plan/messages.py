"""Messages between stages, the channels they travel on, and the order of micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.arraypipe.plan.types import Channel, Message, Routes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan


def routes(
    plan: ExecutionPlan,
    ties: Sequence[tuple[int, int]] = (),
    together: Collection[int] = (),
    summed: bool = False,
) -> Routes:
    """The messages of a plan.

    `ties` are pairs (stage, next stage that uses one of its weights), the same for all jobs; the
    updates of the jobs `together` wait for the gradients of all stages; `summed`: the gradient of a
    tied weight is sent once an iteration, not with every micro-batch.
    """
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
    at = {block[1:6]: block.operation for block in plan.blocks}
    last = plan.n_stages - 1
    for i, kind, j, s, m, a, *_ in plan.blocks:
        ends = i in plan.last_backwards
        if kind == "F" and m == 0:
            for lender, user in ties:
                if lender == s:
                    yield Message("weight", i, at["F", j, user, 0, a])
        if kind == "F" and s < last:
            yield Message("activation", i, at["F", j, s + 1, m, a])
        if kind == "B":
            if s > 0:
                yield Message("gradient", i, at["B", j, s - 1, m, a])
            for lender, user in ties if ends or not summed else ():
                if user == s:
                    yield Message("tied", i, at["B", j, lender, m, a])
            if s == 0 and j in together and ends:
                for other in range(1, plan.n_stages):
                    yield Message("factor", i, at["U", j, other, 0, a])
