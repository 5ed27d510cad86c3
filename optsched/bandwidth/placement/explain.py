"""Why a request got its GPUs, what else there was, and the document ``optsched.dispatch/1``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.model import CountModel
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.topology.links import weight
from optsched.bandwidth.topology.rates import KILOBYTES, shown
from optsched.io.strict_json import lines

if TYPE_CHECKING:
    from optsched.bandwidth.placement.problem import DispatchChoice
    from optsched.bandwidth.topology.policy import Policy
    from optsched.solving.result import Result

FORMAT = "optsched.dispatch/1"


def explained(choice: DispatchChoice) -> str:
    """One fact a line."""
    problem = choice.problem
    facts = [
        f"{written_pattern(tuple(choice.counts.values()))} GPUs: "
        f"{problem.state.written(choice.gpus)}",
        f"bandwidth {shown(choice.bandwidth)}"
        + (f" of {shown(choice.standalone)} alone" if choice.share.jobs else ""),
        f"limited by {limit_of(choice)}",
    ]
    if choice.share.jobs:
        one = choice.share
        facts.append(
            f"shared with {', '.join(one.jobs)}: together {shown(one.capacity or 0)} (the least, "
            f"with {one.job}), asked {shown(one.standalone + one.demand)}"
        )
    if problem.model.mixed:
        facts.append("the model mixes measurements of several payloads or collectives")
    facts += problem.model.assumed
    facts += [f"costs {name} {shown(lost)}" for name, lost in choice.victims.items()]
    if choice.regret:
        facts.append(f"not all of this is measured: up to {shown(choice.regret)} may be lost")
    if not problem.policy.is_free:
        facts.append(f"the policy costs {shown(choice.price_of_policy)}")
    return "\n".join([*facts, *_alternatives(choice)])


def limit_of(choice: DispatchChoice) -> str:
    """What holds the standalone bandwidth back: a host and its weakest link, or the network."""
    problem, cluster = choice.problem, choice.problem.cluster
    model = problem.model
    if len(choice.gpus) == 1:
        return "nothing: a single GPU does not communicate"
    for h, name in enumerate(host.name for host in cluster.hosts):
        first = int(cluster.first[h])
        local = [g - first for g in choice.gpus if int(cluster.host_of[g]) == h]
        if len(local) < 2:
            continue
        inside = problem.judged_by.of([first + i for i in local])
        if inside != choice.standalone:
            continue
        links = cluster.type(h).links
        what = f"the links within {name}: {shown(inside)}"
        if links is None:
            known = cluster.type(h).intra is not None or not model.assumed
            return what if known else f"{what}, assumed"
        pairs = [(i, k) for i in local for k in local if i < k]
        i, k = min(pairs, key=lambda pair: weight(links[pair[0]][pair[1]]))
        return f"{what} (weakest link {links[i][k]}, GPUs {i} and {k})"
    pattern = written_pattern(tuple(choice.counts.values()))
    what = f"the network for {pattern}: {shown(choice.standalone)}"
    if isinstance(model, CountModel):
        counts = np.sort(np.array([list(choice.counts.values())], np.int64))[:, ::-1]
        low, high = (int(model.network(counts, end)[0]) for end in ("low", "high"))
        if low == high:
            return f"{what}, measured"
        return f"{what}, predicted ({shown(max(low, 0))} to {shown(high)})"
    return f"{what}, predicted"


def _alternatives(choice: DispatchChoice) -> list[str]:
    """The best of other kinds of choices, a line each."""
    problem = choice.problem
    if problem.tables is None:  # nothing to ask for others
        return []
    policy, k = problem.policy, problem.k
    fewest = next(
        (n for n in range(1, k + 1) if problem.best(replace(policy, min_hosts=1, max_hosts=n))),
        None,
    )
    others: list[tuple[str, Policy | None, int]] = [
        ("on one host", replace(policy, min_hosts=1, max_hosts=1), k),
        ("on the fewest hosts", replace(policy, min_hosts=1, max_hosts=fewest), k),
        ("balanced", replace(policy, balance="even"), k),
        ("one GPU less", policy, k - 1),
        ("one GPU more", policy, k + 1),
    ]
    if not policy.is_free:
        others.insert(3, ("without the policy", None, k))
    said = []
    for what, rules, size in others:
        found = problem.best(rules, size)
        if found is None:
            said.append(f"{what}: not possible")
            continue
        pattern = written_pattern(problem.cluster.counts(found.gpus))
        relative = f" ({found.value / choice.bandwidth:.0%})" if choice.bandwidth else ""
        said.append(f"{what}: {pattern}, {shown(found.value)}{relative}")
    return said


def to_json(choice: DispatchChoice, result: Result) -> bytes:
    """The document of a solved request, a field a line.

    Bandwidths are in GB/s, exact to the kB/s. What does not apply is left out.
    """
    problem, share = choice.problem, choice.share
    fields: dict[str, Any] = {
        "format": FORMAT,
        "status": result.status,
        "gpus": problem.state.written(choice.gpus),
        "counts": choice.counts,
        "ranks": [problem.state.gpu_name(gpu) for gpu in choice.rank_order],
        "bandwidth": _rate(share.value),
        "standalone": _rate(share.standalone),
        "upper_bound": None if result.lower_bound is None else _rate(-result.lower_bound),
        "limited_by": limit_of(choice) or None,
        "jobs": list(share.jobs) or None,
        "capacity": _rate(share.capacity),
        "asked": _rate(share.standalone + share.demand) if share.jobs else None,
        "victims": {name: _rate(lost) for name, lost in choice.victims.items()} or None,
        "regret": _rate(choice.regret),
        "price_of_policy": None if problem.policy.is_free else _rate(choice.price_of_policy),
        "mixed_measurements": problem.model.mixed or None,
        "assumed": list(problem.model.assumed) or None,
    }
    return lines({key: value for key, value in fields.items() if value is not None})


def _rate(kilobytes: float | None) -> float | None:
    return None if kilobytes is None else kilobytes / KILOBYTES
