"""Several requests at once: each gets its GPUs, and all start or none does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import combinations, permutations, product
from typing import TYPE_CHECKING, Final, Protocol

from optsched.bandwidth.models.contention import share
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import Infeasible, InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.search.by_counts import Answer
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState

    Answers = dict[str, Answer]


MOST_BARRED: Final = 4
"""Hosts of a request without which it is placed again, one at a time."""


class Chooser(Protocol):
    """The part of a `Dispatcher` that a gang needs."""

    model: BandwidthModel
    policy: Policy

    def answer(self, state: ClusterState, k: int, deadline: float | None = None) -> Answer:
        """The best choice for one request."""

    def demands(self, state: ClusterState) -> list[int]:
        """kB/s of every running job."""


def choose_gang(
    dispatcher: Chooser,
    state: ClusterState,
    requests: Mapping[str, int],
    deadline: float | None = None,
) -> Answers:
    """Choose GPUs for several requests; the sum of bandwidths counts, behind preferred domains.

    They are placed one after the other in several orders. Then single requests are placed again,
    also on hosts that no other request uses, or without one of theirs, until the sum stops rising.
    The first order is always finished.
    """
    _check(state, requests)
    gang = _Gang(dispatcher, state, requests, deadline)
    sizes = sorted(requests, key=lambda name: -requests[name])
    best: Answers = {}
    reason: Infeasible | None = None
    orders = dict.fromkeys((tuple(sizes), tuple(requests), tuple(sizes[::-1])))
    for order, apart in product(orders, (False, True)):
        if best and gang.is_late:
            break
        try:
            best = max(best, gang.placed({}, order, apart=apart), key=gang.worth)
        except Infeasible as error:
            reason = error
    if not best:
        raise Infeasible(f"gang: {reason}")
    best = gang.improved(best)
    alone = {k: dispatcher.answer(state, k, gang.time_for(4)) for k in {*requests.values()}}
    found = {}
    for name, k in requests.items():
        one, upper = best[name], alone[k].upper_bound
        if gang.domains(one) > gang.domains(alone[k]):  # of which the other's bound says nothing
            upper = MOST
        found[name] = one._replace(upper_bound=max(one.value, upper))
    return found


class _Gang:
    """Placements of requests next to each other and to the running jobs."""

    def __init__(
        self,
        dispatcher: Chooser,
        state: ClusterState,
        requests: Mapping[str, int],
        deadline: float | None,
    ) -> None:
        self.dispatcher, self.state, self.requests = dispatcher, state, requests
        self.until = None
        if deadline is not None:
            self.until = time.monotonic() + number("deadline", deadline, above=True, what="seconds")

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.until is not None and time.monotonic() > self.until

    def domains(self, answer: Answer) -> int:
        """Number of preferred domains of an answer."""
        return self.dispatcher.policy.domains(self.state.cluster, answer.gpus)

    def worth(self, answers: Answers) -> tuple[bool, int, int]:
        """Order of placements: few preferred domains, then the sum of bandwidths."""
        domains = sum(self.domains(one) for one in answers.values())
        return bool(answers), -domains, sum(one.value for one in answers.values())

    def time_for(self, n: int) -> float | None:
        """Seconds for one of n more searches."""
        return None if self.until is None else max(1e-4, (self.until - time.monotonic()) / n)

    def placed(
        self, kept: Answers, order: Iterable[str], *, apart: bool = False, barred: int = -1
    ) -> Answers:
        """Place requests in an order, the others kept; bandwidths are those next to all of them.

        `apart`: on hosts of no placed request, where possible; `barred`: the first one not there.
        """
        found, after, names = dict(kept), self.state, list(order)
        for name, one in kept.items():
            after = after.take(one.gpus, name, one.standalone)
        for i, name in enumerate(names):
            hosts = {*self.hosts_of(found.values())} if apart else {barred if i == 0 else -1}
            one = self._answer(
                after, self.requests[name], hosts, self.time_for(2 * (len(names) - i))
            )
            found[name], after = one, after.take(one.gpus, name, one.standalone)
        for name, one in found.items():
            others = after.give(name)
            got = share(self.dispatcher.model, others, one.gpus, self.dispatcher.demands(others))
            found[name] = one._replace(value=got.value)
        return found

    def hosts_of(self, answers: Iterable[Answer]) -> list[int]:
        """Hosts that answers use."""
        host_of, _, _ = self.state.cluster.places
        return list(dict.fromkeys(host_of[gpu] for one in answers for gpu in one.gpus))

    def _answer(
        self, state: ClusterState, k: int, avoided: set[int], seconds: float | None
    ) -> Answer:
        """The best choice without some hosts, or with them if there is none."""
        host_of, _, _ = state.cluster.places
        here = state.without([gpu for gpu in state.free if host_of[gpu] in avoided])
        try:
            return self.dispatcher.answer(here, k, seconds)
        except Infeasible:
            return self.dispatcher.answer(state, k, seconds)

    def improved(self, best: Answers) -> Answers:
        """Place single requests and pairs again until the sum stops rising."""
        groups = [group for n in (1, 2) for group in combinations(self.requests, n)]
        todo = deque(groups)
        while todo and not self.is_late:
            group = todo.popleft()
            kept = {name: one for name, one in best.items() if name not in group}
            for order in permutations(group):
                found = [self.placed(kept, order), self.placed(kept, order, apart=True)]
                found += [
                    self.placed(kept, order, barred=host)
                    for host in self.hosts_of([best[order[0]]])[:MOST_BARRED]
                ]
                better = max(found, key=self.worth)
                if self.worth(better) > self.worth(best):
                    best, todo = better, deque(groups)
        return best


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
