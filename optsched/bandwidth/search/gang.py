"""Several requests at once: each gets its own GPUs, and all start or none does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from optsched.bandwidth.models.contention import share
from optsched.errors import Infeasible, InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.search.ask import Answer
    from optsched.bandwidth.topology.state import ClusterState


class Chooser(Protocol):
    """What a gang needs of a `Dispatcher`."""

    model: BandwidthModel

    def answer(self, state: ClusterState, k: int, deadline: float | None = None) -> Answer:
        """The best choice for one request."""

    def demands(self, state: ClusterState) -> list[int]:
        """kB/s of every running job."""


def choose_gang(
    dispatcher: Chooser,
    state: ClusterState,
    requests: Mapping[str, int],
    deadline: float | None = None,
) -> dict[str, Answer]:
    """Choose GPUs for several requests, one after the other in several orders; the best sum counts.

    Parameters
    ----------
    dispatcher, state
        What chooses, and the state before.
    requests
        Name of the job that would start to its number of GPUs.
    deadline
        Seconds for all of it; the first order is always finished.

    Raises
    ------
    InputError
        No request, or the name of a job that runs.
    Infeasible
        More GPUs than are free, or in no order all of them find a place.
    """
    _check(state, requests)
    until = None
    if deadline is not None:
        until = time.monotonic() + number("deadline", deadline, above=True, what="seconds")
    sizes = sorted(requests, key=lambda name: -requests[name])
    best: dict[str, Answer] = {}
    reason: Infeasible | None = None
    uppers: dict[int, int] = {}  # by number of GPUs, without the other requests
    for order in dict.fromkeys((tuple(sizes), tuple(requests), tuple(sizes[::-1]))):
        if best and until is not None and time.monotonic() > until:
            break
        try:
            found = _in_order(dispatcher, state, requests, order, until)
        except Infeasible as error:
            reason = error
            continue
        for name, one in found.items():
            k = requests[name]
            if k not in uppers:
                left = None if until is None else max(1e-4, (until - time.monotonic()) / 4)
                uppers[k] = dispatcher.answer(state, k, left).upper_bound
            found[name] = one._replace(upper_bound=max(one.value, uppers[k]))
        best = max(filter(None, (best, found)), key=lambda one: sum(a.value for a in one.values()))
    if not best:
        raise Infeasible(f"gang: {reason}")
    return {name: best[name] for name in requests}


def _check(state: ClusterState, requests: Mapping[str, int]) -> None:
    if not isinstance(requests, Mapping) or not requests:
        got = format_value(requests or "none")
        raise InputError(f"gang: expected requests by name, such as {{'a': 8}}, got {got}")
    running = {job.name for job in state.jobs}
    for name, k in requests.items():
        integer(f"gang: {name!r:.60}", k, 1, 2**31)
        if name in running:
            raise InputError(f"gang: a job {name!r:.60} runs already")
    total = sum(requests.values())
    if total > len(state.free):
        raise Infeasible(f"gang: requested {total}, free {len(state.free)}")


def _in_order(
    dispatcher: Chooser,
    state: ClusterState,
    requests: Mapping[str, int],
    order: Iterable[str],
    until: float | None,
) -> dict[str, Answer]:
    """Answers of the requests placed one after the other, with all of them as tenants."""
    found: dict[str, Answer] = {}
    after = state
    for i, name in enumerate(order):
        left = None
        if until is not None:
            left = max(1e-4, (until - time.monotonic()) / (len(requests) - i))
        found[name] = answer = dispatcher.answer(after, requests[name], left)
        after = after.take(answer.gpus, name, answer.standalone)
    for name, answer in found.items():
        others = after.give(name)
        got = share(dispatcher.model, others, answer.gpus, dispatcher.demands(others))
        found[name] = answer._replace(value=got.value)
    return found
