"""Predictions that leave the order of the line rate only where measurements say so.

Of many patterns that were not measured a search takes the one that is overrated most. Where a
process is not sure, its differences are chance, and choices by the line rate alone are better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from optsched.bandwidth.models.gaussian import Floats

LINE: Final = 0.1
"""By how much the line rate is off before anything is measured; a deviation of logs."""
WEIGHT: Final = 2
"""Measurements that `LINE` counts for."""


def beside_line_rate(expected: Floats, deviation: Floats, rate: Floats, seen: Floats) -> Floats:
    """Means of the process and of the line rate, each weighted by one over its squared error.

    The line rate is scaled to the measured patterns, and its error is what it had on them.

    Parameters
    ----------
    expected, deviation
        Logs that a process predicts, and how sure it is; shape (n,).
    rate
        Logs of line rates, shape (n,).
    seen
        Log of measured / line rate of every measured pattern.
    """
    scale = float(np.median(seen)) if len(seen) else 0.0
    freedom = WEIGHT + max(0, len(seen) - 1)
    error = (WEIGHT * LINE**2 + ((seen - scale) ** 2).sum()) / freedom
    share = error / (error + deviation**2)
    return np.asarray(share * expected + (1 - share) * (rate + scale))


def pooled(logs: Floats, deviation: Floats, rate: Floats) -> Floats:
    """Patterns of one line rate drawn to their mean, and onto it where they are not told apart.

    The positive-part estimator of James and Stein (1961), by groups: differences stay in the
    share that their spread exceeds the mean squared deviation.

    Parameters
    ----------
    logs, deviation
        Predictions and how sure they are, shape (n,).
    rate
        Logs of line rates, shape (n,): equal ones are a group.
    """
    _, group = np.unique(np.round(rate, 9), return_inverse=True)
    weight = 1 / deviation**2
    mean = (np.bincount(group, weight * logs) / np.bincount(group, weight))[group]
    size = np.bincount(group)
    spread = np.bincount(group, (logs - mean) ** 2) / size
    doubt = np.bincount(group, deviation**2) / size
    kept = np.maximum(0.0, 1 - doubt / np.maximum(spread, 1e-12))[group]
    return np.asarray(np.where(size[group] > 1, mean + kept * (logs - mean), logs))
