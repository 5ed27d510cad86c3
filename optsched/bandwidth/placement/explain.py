"""Why a request got its GPUs, what else there was, and the document ``optsched.dispatch/1``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.model import CountModel
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.search.by_counts import order_of, rules_of
from optsched.bandwidth.topology.levels import WHOLE, line
from optsched.bandwidth.topology.links import weight
from optsched.bandwidth.topology.rates import KILOBYTES, MOST, rate_text
from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import lines, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        f"bandwidth {rate_text(choice.bandwidth)}"
        + (f" of {rate_text(choice.standalone)} alone" if choice.share.jobs else ""),
        f"limited by {limit_of(choice)}",
        *_levels(choice),
    ]
    if choice.share.jobs:
        one = choice.share
        facts.append(
            f"shared with {', '.join(one.jobs)}: together {rate_text(one.capacity or 0)} (the "
            f"least, with {one.job}), demanded {rate_text(one.standalone + one.demand)}"
        )
    if problem.model.mixed:
        facts.append("the model mixes measurements of several payloads or collectives")
    facts += problem.model.assumed
    facts += [f"costs {name} {rate_text(lost)}" for name, lost in choice.victims.items()]
    if choice.regret:
        facts.append(f"not all of this is measured: up to {rate_text(choice.regret)} may be lost")
    return "\n".join([*facts, *_rule(choice), *_alternatives(choice)])


def _levels(choice: DispatchChoice) -> Iterator[str]:
    """Domains used, the factor and the uplinks of the lowest common level, rails."""
    cluster = choice.problem.cluster
    levels, counts = cluster.network_levels, cluster.counts(choice.gpus)
    used = np.flatnonzero(counts).tolist()
    for i, name in enumerate(cluster.levels):
        names = [key for key, hosts in cluster.domains(i).items() if {*hosts} & {*used}]
        yield f"{name}: {len(names)} of {len(cluster.domains(i))} ({shortened(names)})"
    lowest = int(levels.lowest(counts[None])[0])
    if 0 <= lowest < len(levels.names):
        factor, uplink = int(levels.factor[lowest]), int(levels.uplink[lowest])
        if factor < WHOLE:
            yield f"across {levels.names[lowest]}: {factor / WHOLE:g} of the bandwidth"
        if uplink < MOST:
            limit = int(line(np.array(uplink), np.array(len(choice.gpus)), np.array(len(used))))
            rates = f"uplinks of {rate_text(uplink)} allow {rate_text(limit)}"
            yield f"across {levels.names[lowest]}: {rates}"
    if cluster.rails and len(used) > 1:
        yield "rails: the same local ids on every host"


def _rule(choice: DispatchChoice) -> Iterator[str]:
    """Which rule preferred the choice to the best other numbers of GPUs on hosts."""
    from optsched.bandwidth.search.dispatcher import Dispatcher

    problem, state = choice.problem, choice.problem.state
    try:
        other_choices = Dispatcher(
            problem.cluster, problem.model, policy=problem.policy, traffic=problem.traffic,
            seed=problem.seed,
        )  # fmt: skip
        found = other_choices.best(state, problem.k, 2, 0.5)
    except (InputError, Infeasible):
        return
    counts = problem.cluster.counts(choice.gpus)
    others = [one for one in found if (problem.cluster.counts(one.gpus) != counts).any()]
    if not others:
        yield "decided by: no other numbers of GPUs on hosts were found"
        return
    domains = [problem.policy.domains(problem.cluster, gpus)
               for gpus in (choice.gpus, others[0].gpus)]  # fmt: skip
    if domains[0] < domains[1]:
        yield (
            f"decided by: preferred, {domains[0]} of {problem.policy.preferred} "
            f"(the next best has {domains[1]} and {rate_text(others[0].value)})"
        )
        return
    if others[0].value < choice.bandwidth:
        yield f"decided by: bandwidth (the next best has {rate_text(others[0].value)})"
        return
    parts = zip(
        rules_of(problem.cluster), order_of(state, choice.gpus),
        order_of(state, others[0].gpus), strict=True,
    )  # fmt: skip
    rule = next((name for name, a, b in parts if a != b), "best fit")
    yield f"decided by: {rule}{', then lowest ids' * (rule == 'best fit')}"


def limit_of(choice: DispatchChoice) -> str:
    """What holds the standalone bandwidth back: a host and its weakest link, or the network."""
    problem, cluster = choice.problem, choice.problem.cluster
    model = problem.model
    if len(choice.gpus) == 1:
        return "nothing: a single GPU does not communicate"
    levels, every = cluster.network_levels, cluster.counts(choice.gpus)
    lowest = int(levels.lowest(every[None])[0])
    factor = int(levels.factor[lowest]) if 0 <= lowest < len(levels.names) else WHOLE
    for h, name in enumerate(host.name for host in cluster.hosts):
        first = int(cluster.first[h])
        local = [g - first for g in choice.gpus if int(cluster.host_of[g]) == h]
        if len(local) < 2:
            continue
        inside = model.of([first + i for i in local])
        if inside * factor // WHOLE != choice.standalone:
            continue
        links = cluster.type(h).links
        what = f"the links within {name}: {rate_text(inside)}"
        if links is None:
            known = cluster.type(h).intra is not None or not model.assumed
            return what if known else f"{what}, assumed"
        pairs = [(i, k) for i in local for k in local if i < k]
        i, k = min(pairs, key=lambda pair: weight(links[pair[0]][pair[1]]))
        return f"{what} (weakest link {links[i][k]}, GPUs {i} and {k})"
    pattern = written_pattern(tuple(choice.counts.values()))
    what = f"the network for {pattern}: {rate_text(choice.standalone)}"
    if 0 <= lowest < len(levels.names) and int(levels.uplink[lowest]) < MOST:
        n, m = np.array(len(choice.gpus)), np.array(len(choice.counts))
        if int(line(levels.uplink[lowest], n, m)) * factor // WHOLE == choice.standalone:
            return f"uplinks below {levels.names[lowest]}: {rate_text(choice.standalone)}"
    if factor < WHOLE:
        what += f" after the factor {factor / WHOLE:g} of {levels.names[lowest]}"
    if isinstance(model, CountModel):
        counts = np.sort(np.array([list(choice.counts.values())], np.int64))[:, ::-1]
        low, high = (int(model.network(counts, end)[0]) for end in ("low", "high"))
        if low == high:
            return f"{what}, measured" if hasattr(model, "table") else what
        return f"{what}, predicted ({rate_text(max(low, 0))} to {rate_text(high)})"
    return f"{what}, predicted"


def _alternatives(choice: DispatchChoice) -> Iterator[str]:
    """The best of other kinds of choices, a line each; none without tables."""
    problem, policy, k = choice.problem, choice.problem.policy, choice.problem.k
    others: list[tuple[str, Policy | None, int]] = [
        ("on one host", replace(policy, min_hosts=1, max_hosts=1), k),
        ("balanced", replace(policy, balance="even"), k),
        ("one GPU less", policy, k - 1),
        ("one GPU more", policy, k + 1),
    ]
    if not policy.is_free:
        others.append(("without the policy", None, k))
    for what, rules, size in others if problem.tables is not None else ():
        if (found := problem.best(rules, size)) is None:
            yield f"{what}: not possible"
            continue
        pattern = written_pattern(problem.cluster.counts(found.gpus))
        relative = f" ({found.value / choice.bandwidth:.0%})" if choice.bandwidth else ""
        yield f"{what}: {pattern}, {rate_text(found.value)}{relative}"


def to_json(choice: DispatchChoice, result: Result) -> bytes:
    """The document of a solved request: bandwidths in GB/s, without what does not apply."""
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
        "demanded": _rate(share.standalone + share.demand) if share.jobs else None,
        "victims": {name: _rate(lost) for name, lost in choice.victims.items()} or None,
        "regret": _rate(choice.regret),
        "mixed_measurements": problem.model.mixed or None,
        "assumed": list(problem.model.assumed) or None,
    }
    return lines({key: value for key, value in fields.items() if value is not None})


def _rate(kilobytes: float | None) -> float | None:
    return None if kilobytes is None else kilobytes / KILOBYTES
