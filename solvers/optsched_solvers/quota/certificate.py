"""What a kernel can prove about its own answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Certificate:
    """A proof of optimality, checked on the answer alone and not on how it was found.

    Parameters
    ----------
    what
        What is optimal, in words.
    value
        What the answer reaches.
    bound
        What no answer can beat; equal to `value` for sums and levels.
    price
        The multiplier of the budget: marginal utility, level or share of a score; None if the
        budget does not bind or has no price.
    holds
        Whether the check succeeded.
    proof
        The kind of check: ``"exchange"``, ``"dual bound"``, ``"dynamic programme"``, ...
    """

    what: str
    value: float
    bound: float
    price: float | None
    holds: bool
    proof: str

    def __bool__(self) -> bool:
        """Whether the check succeeded."""
        return self.holds
