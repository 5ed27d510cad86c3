"""The document ``optsched.dispatch/1``: which GPUs a request got, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.bandwidth.rates import KILOBYTES

if TYPE_CHECKING:
    from optsched.problems.gpus.choice import DispatchChoice
    from optsched.solving.result import Result

FORMAT = "optsched.dispatch/1"


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An answer; bandwidths in GB/s, exact to the kB/s."""

    format: str = FORMAT
    status: str
    gpus: str
    counts: dict[str, int]
    ranks: list[str]
    bandwidth: float
    standalone: float
    upper_bound: float | None = None
    limited_by: str = ""
    jobs: list[str] = []
    capacity: float | None = None
    asked: float | None = None
    victims: dict[str, float] = {}
    regret: float | None = None
    price_of_policy: float | None = None
    mixed_measurements: bool = False


def answer_of(choice: DispatchChoice, result: Result) -> Answer:
    """The answer of a solved request."""
    from optsched.problems.gpus.choice import limit_of

    problem, share = choice.problem, choice.share
    cluster = problem.cluster
    return Answer(
        status=result.status,
        gpus=cluster.written(choice.gpus),
        counts=choice.counts,
        ranks=[cluster.gpu_name(gpu) for gpu in choice.rank_order],
        bandwidth=share.value / KILOBYTES,
        standalone=share.standalone / KILOBYTES,
        upper_bound=None if result.lower_bound is None else -result.lower_bound / KILOBYTES,
        limited_by=limit_of(choice),
        jobs=list(share.jobs),
        capacity=None if share.capacity is None else share.capacity / KILOBYTES,
        asked=(share.standalone + share.demand) / KILOBYTES if share.jobs else None,
        victims={name: lost / KILOBYTES for name, lost in choice.victims.items()},
        regret=None if choice.regret is None else choice.regret / KILOBYTES,
        price_of_policy=(None if problem.policy.is_free else choice.price_of_policy / KILOBYTES),
        mixed_measurements=problem.model.mixed,
    )


def to_json(answer: Answer) -> bytes:
    """The document, a field a line."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    fields = {"format": FORMAT, **fields}
    encode = msgspec.json.encode
    body = b",\n".join(b'  "%s": %s' % (k.encode(), encode(v)) for k, v in fields.items())
    return b"{\n" + body + b"\n}\n"
