"""Block times and bytes at sizes that were not measured: a piecewise-affine fit, slope >= 0.

It is fitted to medians, never to minima: on small blocks the minima of neighbouring sizes are drawn
from different states of the machine, and what they predict is off by up to 78 %.
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Curve:
    """A nondecreasing, piecewise-affine function of the micro-batch size, in exact fractions.

    Between measured sizes it joins the monotone regression of the medians. Beyond the largest it
    goes on with the least-squares slope of the last three; below the smallest with the first
    slope, but never below proportionality. Points are pairs (size, value), at least one, sizes
    distinct and ascending.
    """

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        self.points = list(points)
        self.sizes = [size for size, _ in points]
        self.values = monotone([value for _, value in points])
        # with one size nothing says what part of the time does not depend on it
        self.first = self.last = self.values[0] / self.sizes[0]
        if len(self.sizes) > 1:
            slope = (self.values[1] - self.values[0]) / (self.sizes[1] - self.sizes[0])
            self.first = min(self.first, slope)
            self.last = _slope(self.sizes[-3:], self.values[-3:])

    def __call__(self, size: int) -> Fraction:
        """Value at a size."""
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0] - self.first * (sizes[0] - size)
        if size >= sizes[-1]:
            return values[-1] + self.last * (size - sizes[-1])
        k = bisect_left(sizes, size)
        part = Fraction(size - sizes[k - 1], sizes[k] - sizes[k - 1])
        return values[k - 1] + part * (values[k] - values[k - 1])

    def left_out(self) -> list[float]:
        """Per measured size its relative error when the others predict it; empty: under three."""
        found = []
        for k, (size, value) in enumerate(self.points if len(self.points) > 2 else ()):
            predicted = Curve([*self.points[:k], *self.points[k + 1 :]])(size)
            found.append(float(abs(predicted - value) / max(value, 1)))
        return found


def monotone(values: Sequence[int]) -> list[Fraction]:
    """The nondecreasing sequence that is nearest in squares (pool adjacent violators)."""
    pools: list[tuple[Fraction, int]] = []  # mean, length
    for value in values:
        mean, length = Fraction(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        pools.append((mean, length))
    return [mean for mean, length in pools for _ in range(length)]


def _slope(sizes: Sequence[int], values: Sequence[Fraction]) -> Fraction:
    """Least-squares slope; >= 0 for nondecreasing values."""
    middle = Fraction(sum(sizes), len(sizes))
    spread = sum((size - middle) ** 2 for size in sizes)
    joint = sum((size - middle) * value for size, value in zip(sizes, values, strict=True))
    return Fraction(joint) / Fraction(spread)
