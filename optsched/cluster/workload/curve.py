"""How a job's uncertainty falls with its passes, and when it is low enough."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_PASSES: Final = 10_000
"""Passes after which a target that was not reached counts as never reached."""


@dataclass(frozen=True)
class Curve:
    """Lower uncertainty: U(p) = U_inf + (U_0 - U_inf) exp(-kappa p) after pass p, plus noise.

    U_0 is `initial`, U_inf `final`, `kappa` > 0. A job is done after the first pass with a report
    of at most `target` (None: it does not end so). `noise` is the standard deviation of reports,
    which are normal, seeded, and stay >= 0.

    Examples
    --------
    >>> curve = optsched.cluster.Curve(initial=0.9, final=0.1, kappa=0.5, target=0.2)
    >>> curve.reached(seed=0, name="job").round(2).tolist()
    [0.59, 0.39, 0.28, 0.21, 0.17]
    """

    initial: float
    final: float
    kappa: float
    target: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        for key in ("initial", "final", "noise"):
            number(f"curve.{key}", getattr(self, key))
        number("curve.kappa", self.kappa, above=True)
        final = f"the final {format_value(self.final)}"
        if self.initial < self.final:
            what = f"{format_value(self.initial)} is below {final}: uncertainty falls"
            raise InputError(f"curve.initial: {what}")
        if self.target is not None and not self.final < number("curve.target", self.target):
            what = f"{format_value(self.target)} is not above {final}: never reached"
            raise InputError(f"curve.target: {what}")

    def reported(self, passes: int, seed: int, name: str) -> npt.NDArray[np.float64]:
        """U with noise after 1, 2, ..., `passes` passes; the noise depends on seed and name only.

        A longer row begins with the shorter one.
        """
        p = np.arange(1, passes + 1, dtype=np.float64)
        values = self.final + (self.initial - self.final) * np.exp(-self.kappa * p)
        if self.noise == 0:
            return values
        key = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        random = np.random.default_rng([integer("seed", seed), int.from_bytes(key, "little")])
        return np.asarray(np.maximum(values + self.noise * random.standard_normal(passes), 0.0))

    def reached(self, seed: int, name: str) -> npt.NDArray[np.float64]:
        """Reports up to the first at or below the target; as many as the job takes passes.

        Raises
        ------
        InputError
            There is no target, or it is not reached in `MOST_PASSES`.
        """
        if self.target is None:
            raise InputError("curve.target: missing, but the job is to end by it")
        for tried in (64, 512, MOST_PASSES):
            values = self.reported(tried, seed, name)
            below = np.flatnonzero(values <= self.target)
            if len(below):
                return values[: below[0] + 1]
        raise InputError(
            f"curve.target: {self.target} is not reached in {MOST_PASSES} passes (the curve is at "
            f"{values[-1]:.6g}); raise it, or kappa"
        )
