"""A learned router as a file of weights: simulated by the kernels, without any other package."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.files import read_bytes, unpack_arrays, write_atomic
from optsched.limits import whole_number
from optsched.problems.routing.checks import frozen
from optsched.serving import actor, rules
from optsched.serving.routers import Compiled

if TYPE_CHECKING:
    import os

    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan

FORMAT: Final = "optsched.policy/1"
STATES: Final = {"paper": actor.PAPER, "extended": actor.EXTENDED}
_SIZES = ("servers", "segments", "widths")
_MOST_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class Policy:
    """A network that chooses server, width and group; a router as `Router` is one.

    Two layers of 64 tanh units, and a linear head each for server, width and group (1, 2, ... 32).
    A width that the server can never run becomes the widest below it that it can.

    Parameters
    ----------
    weights
        Of both layers and the heads, weights before biases (`optsched.serving.actor.sizes`).
    servers, segments, widths
        What it was trained for.
    state
        ``"paper"`` (2 + 3N features) or ``"extended"`` (15 + 8N for four segments).
    epsilon
        Share of the uniform distribution in the choice of the server.
    sampled
        Decisions are drawn, with the simulation's seed; False: the most likely ones.
    """

    weights: Any
    servers: int
    segments: int
    widths: int
    state: str = "extended"
    epsilon: float = 0.05
    sampled: bool = False

    def __post_init__(self) -> None:
        for key in _SIZES:
            whole_number(key, getattr(self, key), 1, 4096)
        if not isinstance(self.state, str) or self.state not in STATES:
            raise InputError(f"state: expected paper or extended, got {self.state!r:.60}")
        if not 0 <= self.epsilon <= 1:
            raise InputError(f"epsilon: expected a number in 0..1, got {self.epsilon!r:.60}")
        count, _ = self.sizes
        found = np.asarray(self.weights)
        if found.shape != (count,) or found.dtype.kind != "f":
            raise InputError(
                f"weights: expected {count} numbers for {self.servers} servers, {self.segments} "
                f"segments and {self.widths} widths, got {found.dtype} {found.shape}"
            )
        if not (np.abs(found) < 1e6).all():  # NaN is not
            raise InputError("weights: expected numbers below a million")
        object.__setattr__(self, "weights", frozen(found.astype(np.float64)))

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of weights, and of what a decision computes with."""
        return actor.sizes(STATES[self.state], self.servers, self.segments, self.widths)

    def compiled(self, problem: Routing, _plan: Plan | None, seed: int) -> Compiled:
        """What the simulation's kernels read; a problem of other sizes is refused."""
        wanted = (len(problem.servers), problem.n_segments, problem.n_widths)
        for key, size in zip(_SIZES, wanted, strict=True):
            if getattr(self, key) != size:
                raise InputError(
                    f"policy: was trained for {getattr(self, key)} {key}, the problem has {size}"
                )
        rule = np.zeros(1, rules.RULE)
        rule["server"], rule["state"] = rules.POLICY, STATES[self.state]
        rule["sampled"], rule["epsilon"] = self.sampled, self.epsilon
        rule["random"] = rules.first_random(seed)
        weights = np.append(self.weights, np.zeros(self.sizes[1]))
        return Compiled.outside()._replace(rule=rule, weights=weights)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an ``.npz``, all of it or nothing."""
        stream = io.BytesIO()
        kept = {key: np.array(value) for key, value in vars(self).items()}
        np.savez(stream, allow_pickle=False, format=np.array(FORMAT), **kept)
        write_atomic(path, stream.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read what `save` wrote.

        Raises
        ------
        InputError
            Another file, a newer format, other shapes, or weights that are no numbers.
        """
        found: dict[str, Any] = unpack_arrays(read_bytes(path), str(path), _MOST_BYTES)
        form = found.pop("format", np.array(""))
        if form.shape or form.item() != FORMAT:
            raise InputError(f"{path}: format: expected {FORMAT!r}, got {form!r:.60}")
        fields = cls.__dataclass_fields__
        for key in fields.keys() ^ found.keys():
            raise InputError(f"{path}: {key}: {'unknown' if key in found else 'missing'}")
        kinds = {"state": "U", "sampled": "b", "epsilon": "f"}
        for key, value in found.items():
            if key != "weights":
                if value.shape or value.dtype.kind != kinds.get(key, "i"):
                    raise InputError(f"{path}: {key}: expected one value, got {value!r:.60}")
                found[key] = value.item()
        try:
            return cls(**found)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
