"""Which subsets of a host's GPUs are alike: orbits under the symmetries of its links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from optsched.bandwidth.topology.intra import MOST_BY_SUBSET

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import HostType
    from optsched.model.schedule import IntArray

Permutation: TypeAlias = tuple[int, ...]

_MOST_STEPS: Final = 100_000  # of one search for a symmetry; without it subsets are called unlike


def subset_orbits(kind: HostType) -> tuple[tuple[int, ...], ...]:
    """Subsets of two GPUs or more, as masks, grouped by what the links tell apart.

    A screen, not the truth: measured values within an orbit spread by one or two per cent on some
    hosts and by a third on others. Where no links are known, or a host has more than 16 GPUs, the
    lowest ids of every size stand for it.

    Returns
    -------
    tuple
        Orbits by size of their subsets, then by lowest mask; masks ascending.
    """
    n = kind.gpus
    if kind.links is None or n > MOST_BY_SUBSET:
        return tuple(((1 << size) - 1,) for size in range(2, n + 1))
    words = sorted({link for row in kind.links for link in row})
    colour = [[words.index(link) for link in row] for row in kind.links]
    label = np.arange(1 << n)
    images = [_image(n, permutation) for permutation in symmetries(colour)]
    changed = True
    while changed:
        before = label
        for image in images:
            label = np.minimum(label, label[image])
        changed = bool((label != before).any())
    orbits: dict[int, list[int]] = {}
    for mask, least in enumerate(label.tolist()):
        if mask.bit_count() >= 2:
            orbits.setdefault(least, []).append(mask)
    ranked = sorted(orbits.values(), key=lambda orbit: (orbit[0].bit_count(), orbit[0]))
    return tuple(tuple(orbit) for orbit in ranked)


def symmetries(colour: list[list[int]]) -> list[Permutation]:
    """Generators of all permutations that keep a symmetric matrix as it is.

    For every i and k > i one that keeps 0..i-1 in place and moves i to k, if there is one: every
    symmetry is a product of such (Sims 1970), and so are the orbits.
    """
    n = len(colour)
    found = []
    for i in range(n):
        for k in range(i + 1, n):
            permutation = _extended(colour, [*range(i), k])
            if permutation is not None:
                found.append(permutation)
    return found


def _extended(colour: list[list[int]], begin: list[int]) -> Permutation | None:
    """A symmetry that maps 0, 1, ... to `begin`, by backtracking; None if there is none."""
    n = len(colour)

    def fits(images: list[int]) -> bool:
        last, to = len(images) - 1, images[-1]
        return to not in images[:-1] and all(
            colour[last][i] == colour[to][image] for i, image in enumerate(images)
        )

    if not all(fits(begin[: i + 1]) for i in range(len(begin))):
        return None
    images, following = list(begin), [0]
    for _ in range(_MOST_STEPS):
        if len(images) == n:
            return tuple(images)
        while following[-1] < n and not fits([*images, following[-1]]):
            following[-1] += 1
        if following[-1] < n:
            images.append(following[-1])
            following[-1] += 1
            following.append(0)
        else:
            following.pop()
            if not following:
                return None
            images.pop()
    return None


def _image(n: int, permutation: Permutation) -> IntArray:
    masks = np.arange(1 << n)
    image = np.zeros(1 << n, np.int64)
    for i, to in enumerate(permutation):
        image |= (masks >> i & 1) << to
    return image
