"""Learned routers: their file, and the kernels that evaluate them."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.files import read_bytes, unpack_arrays, write_atomic
from optsched.io.values import boolean, frozen, integer, one_of
from optsched.kernels.compile import helper
from optsched.serving.core import EMPTY, FREE, UNIT, UNLOADING
from optsched.serving.rules import N_GROUPS, POLICY, RULE, Compiled, by_rule, draw, first_random
from optsched.serving.tables import non_negative

if TYPE_CHECKING:
    import os

    from optsched.serving.plan import Plan
    from optsched.serving.scenario import Scenario

POLICY_FORMAT: Final = "optsched.policy/1"
_SIZES: Final = ("servers", "segments", "widths")
_MAX_BYTES: Final = 2**26
_PARTS: Final = 2**24  # resolution of random numbers
HIDDEN: Final = 64
"""Units of each of the two layers of a learned policy."""


@dataclass(frozen=True, eq=False)
class Policy:
    """Router that chooses server, width and group by a network: two layers of 64 tanh units.

    If the chosen server can never run the segment, the next one is taken; if it can never run the
    width, the widest one below.

    Parameters
    ----------
    weights
        W1, b1, W2, b2 of the layers and W3, b3 of all heads, [input][unit], concatenated.
    servers, segments, widths
        Sizes of the scenario that it was trained for.
    state
        ``"paper"`` (2 + 3N features) or ``"extended"`` (15 + 8N for four segments).
    epsilon
        Share of the uniform distribution in the choice of the server.
    sampled
        Draw decisions, with the simulation's seed; False: take the most likely.

    Examples
    --------
    >>> import numpy as np
    >>> from optsched import serving
    >>> policy = serving.Policy(np.zeros(7565), servers=3, segments=4, widths=4)  # untrained
    >>> serving.simulate(serving.reference(rate=50, seconds=0.1), policy).summary.accuracy
    70.3
    """

    weights: Any
    servers: int
    segments: int
    widths: int
    state: str = "extended"
    epsilon: float = 0.05
    sampled: bool = False

    def __post_init__(self) -> None:
        shape = [integer(key, getattr(self, key), 1, 4096) for key in _SIZES]
        one_of("state", self.state, ("paper", "extended"))
        if non_negative("epsilon", self.epsilon) > 1:
            raise InputError(f"epsilon: expected a number in 0..1, got {self.epsilon!r:.60}")
        object.__setattr__(self, "sampled", boolean("sampled", self.sampled))
        _, count, _ = sizes(self.state, *shape)
        found = np.asarray(self.weights)
        if found.shape != (count,) or found.dtype.kind != "f" or not (abs(found) < 1e6).all():
            raise InputError(
                f"weights: expected {count} numbers below a million for {shape} servers, segments "
                f"and widths, got {found.dtype} {found.shape}"
            )
        object.__setattr__(self, "weights", frozen(found.astype(np.float64)))

    def compiled(self, scenario: Scenario, _plan: Plan | None, seed: int) -> Compiled:
        """Return the arrays of the kernels; a scenario of other sizes is refused."""
        shape = (len(scenario.servers), scenario.n_segments, scenario.n_widths)
        for key, size in zip(_SIZES, shape, strict=True):
            if getattr(self, key) != size:
                raise InputError(
                    f"policy: was trained for {getattr(self, key)} {key}, the scenario has {size}"
                )
        inputs, _, buffers = sizes(self.state, *shape)
        rule = np.zeros(1, RULE)
        rule["server"], rule["inputs"], rule["sampled"] = POLICY, inputs, self.sampled
        rule["epsilon"], rule["random"] = self.epsilon, first_random(seed)
        return Compiled(rule, weights=np.append(self.weights, np.zeros(buffers)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an ``.npz``, atomically."""
        stream = io.BytesIO()
        np.savez(stream, format=np.array(POLICY_FORMAT), **vars(self))
        write_atomic(path, stream.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a file of `save`.

        Raises
        ------
        InputError
            A different kind of file, a newer format, or a field that is missing or wrong.
        """
        found: dict[str, Any] = unpack_arrays(read_bytes(path), str(path), _MAX_BYTES)
        weights, form = found.pop("weights", None), found.pop("format", "nothing")
        try:
            if str(form) != POLICY_FORMAT:
                raise InputError(f"format: expected {POLICY_FORMAT!r}, got {form!r:.60}")
            for key in cls.__dataclass_fields__.keys() ^ found.keys() ^ {"weights"}:
                raise InputError(f"{key}: {'unknown' if key in found else 'missing'}")
            for key in (key for key, value in found.items() if value.shape):
                raise InputError(f"{key}: expected one value, got {found[key]!r:.60}")
            return cls(weights, **{key: value.item() for key, value in found.items()})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def sizes(state: str, servers: int, segments: int, widths: int) -> tuple[int, int, int]:
    """Return the numbers of features, of weights, and of buffers of a forward pass."""
    n = 2 + 3 * servers if state == "paper" else 3 + 3 * segments + 8 * servers
    heads = servers + widths + N_GROUPS
    return n, (n + HIDDEN + 2) * HIDDEN + (HIDDEN + 1) * heads, n + 2 * HIDDEN + heads


# learned policies; ``world.weights`` has the parameters, then the buffers of a forward pass


@helper(counted=False, inline=True)
def features(world):  # type: ignore[no-untyped-def]
    """Write the features of a decision; returns their position in ``world.weights``.

    Reconstructed from the paper: requests at the router, share completed, and per server MMACs that
    are queued, power and U. Extended: segment, last and earlier widths, requests at the router
    by segment, age of the head, and per server queued and running ms, free instances of the
    segment, free memory, whether the segment is resident at full width. Counts, times and U as
    log(1 + x), all others as fractions.
    """
    x = world.weights
    trace = world.trace[0]
    core = world.core
    servers, segments, widths = world.feasible.shape
    n = world.rule[0].inputs
    first = len(x) - (n + 2 * HIDDEN + servers + widths + N_GROUPS)
    waiting = 0
    for f in range(segments):
        waiting += world.fifo[f].images
    x[first] = math.log1p(waiting)
    x[first + 1] = trace.completed / max(trace.arrived, 1)
    at = first + 2
    for s in range(servers):
        server = core.server[s]
        x[at] = math.log1p(max(0.0, server.queued_mmac) / 100.0)
        x[at + 1] = server.watts / max(server.peak_w, 1e-9)
        x[at + 2] = math.log1p(server.load / UNIT)
        at += 3
    if at == first + n:  # paper
        return first
    k = trace.segment
    head = world.request[world.fifo[k].head]
    prefix = head.tuple
    for f in range(segments):
        x[at + f] = 1.0 if f == k else 0.0
        x[at + segments + f] = 0.0
        x[at + 2 * segments + f] = math.log1p(world.fifo[f].images)
    x[at + segments] = (head.width + 1) / widths if k else 0.0
    for f in range(k, 0, -1):
        x[at + segments + f] = (prefix % widths + 1) / widths
        prefix //= widths
    at += 3 * segments
    x[at] = math.log1p((trace.now - world.arrival[world.fifo[k].head]) * 1e-6)
    at += 1
    for s in range(servers):
        server = core.server[s]
        free, full = 0, 0.0
        for i in range(core.instance.shape[1]):
            slot = core.instance[s, i]
            if slot.segment == k and slot.state != EMPTY and slot.state != UNLOADING:
                free += slot.state == FREE
                if slot.width == widths - 1:
                    full = 1.0
        x[at] = math.log1p(max(0.0, server.queued) * 1e-6)
        x[at + 1] = math.log1p(max(0.0, server.active) * 1e-6)
        x[at + 2] = math.log1p(free)
        x[at + 3] = 1.0 - server.used / max(server.vram, 1)
        x[at + 4] = full
        at += 5
    return first


@helper(counted=False, inline=True)
def decide(world):  # type: ignore[no-untyped-def]
    """Write server, width and group of the next block; False for a router in Python.

    pi(s, w, g) = pi_server pi_width pi_group, a softmax each; the server's is mixed with the
    uniform distribution: (1 - epsilon) pi + epsilon / N (reconstructed).
    """
    rule = world.rule[0]
    if rule.server != POLICY:
        return by_rule(world)
    x = world.weights
    servers, _, widths = world.feasible.shape
    at = features(world)
    weight, at = _layer(x, 0, at, rule.inputs, HIDDEN, True)
    weight, at = _layer(x, weight, at, HIDDEN, HIDDEN, True)
    _, at = _layer(x, weight, at, HIDDEN, servers + widths + N_GROUPS, False)
    s = _choose(x, at, servers, rule, rule.epsilon)
    w = _choose(x, at + servers, widths, rule, 0.0)
    set_decision(world, s, w, _choose(x, at + servers + widths, N_GROUPS, rule, 0.0))
    return True


@helper(counted=False, inline=True)
def set_decision(world, s, w, g):  # type: ignore[no-untyped-def]
    """Write the first feasible server from s on, the widest feasible width up to w, and 2**g."""
    trace = world.trace[0]
    servers = len(world.feasible)
    for _ in range(servers):
        if not world.feasible[s, trace.segment, 0]:
            s = (s + 1) % servers
    while w > 0 and not world.feasible[s, trace.segment, w]:
        w -= 1
    trace.server, trace.width = s, w
    trace.group = min(1 << g, world.core.state[0].max_batch)


@helper(counted=False)
def _layer(x, weight, given, n, m, squashed):  # type: ignore[no-untyped-def]
    """``x[given + n:][:m] = x[given:][:n] @ W + b``; positions of the next weights and of the m."""
    # unsigned: indices that may be negative are not vectorised, which takes twice as long
    made, bias, columns = np.uint64(given + n), np.uint64(weight + n * m), np.uint64(m)
    for j in range(columns):
        x[made + j] = x[bias + j]
    for i in range(n):
        factor, row = x[given + i], np.uint64(weight + i * m)
        for j in range(columns):
            x[made + j] += factor * x[row + j]
    if squashed:
        for j in range(given + n, given + n + m):  # three times as fast as math.tanh
            x[j] = 1.0 - 2.0 / (math.exp(2.0 * min(max(x[j], -20.0), 20.0)) + 1.0)
    return weight + (n + 1) * m, given + n


@helper(counted=False)
def _choose(x, at, n, rule, epsilon):  # type: ignore[no-untyped-def]
    """The most likely of n logits; or one drawn by (1 - epsilon) softmax + epsilon / n."""
    best, total = 0, 0.0
    for j in range(n):
        if x[at + j] > x[at + best]:
            best = j
    if not rule.sampled:
        return best
    most = x[at + best]
    for j in range(n):
        total += math.exp(x[at + j] - most)
    left = (draw(rule, _PARTS) + 0.5) / _PARTS
    for j in range(n):
        left -= (1.0 - epsilon) * math.exp(x[at + j] - most) / total + epsilon / n
        if left < 0.0:
            return j
    return best
