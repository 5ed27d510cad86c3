"""The document ``optsched.dispatch/1``: which GPUs a request got, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.bandwidth.topology.rates import KILOBYTES
from optsched.io.strict_json import lines

if TYPE_CHECKING:
    from optsched.problems.gpus.problem import DispatchChoice
    from optsched.solving.result import Result

FORMAT = "optsched.dispatch/1"


def to_json(choice: DispatchChoice, result: Result) -> bytes:
    """The document of a solved request, a field a line.

    Bandwidths are in GB/s, exact to the kB/s. What does not apply is left out.
    """
    from optsched.problems.gpus.explain import limit_of

    problem, share = choice.problem, choice.share
    cluster = problem.cluster
    fields: dict[str, Any] = {
        "format": FORMAT,
        "status": result.status,
        "gpus": cluster.written(choice.gpus),
        "counts": choice.counts,
        "ranks": [cluster.gpu_name(gpu) for gpu in choice.rank_order],
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
    }
    return lines({key: value for key, value in fields.items() if value is not None})


def _rate(kilobytes: float | None) -> float | None:
    return None if kilobytes is None else kilobytes / KILOBYTES
