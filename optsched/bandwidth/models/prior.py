"""What network cards alone allow: a table of the network without any run across hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray


def host_rates(cluster: Cluster) -> npt.NDArray[np.float64]:
    """kB/s that c GPUs of one host bring to the network, by c from 0 to the largest host.

    A GPU has its share of the host's network cards, and at least one card. A pattern says how many
    GPUs a host gives, not which host: where types differ, the best of those with enough GPUs
    counts. A limit that is too high is corrected by measuring, since a search asks for it; one
    that is too low hides good sets of GPUs from every search, and nobody would ever measure them.
    """
    most = int(cluster.sizes.max())
    count = np.arange(most + 1)
    rates = np.zeros(most + 1)
    for kind in {cluster.types[t] for t in cluster.type_of}:
        cards = np.minimum(kind.nics, np.maximum(1.0, count * kind.nics / kind.gpus))
        brought = kind.nic_kilobytes * cards
        rates = np.maximum(rates, np.where(count <= kind.gpus, brought, 0.0))
    rates[0] = 0.0
    return rates


def line_rate(cluster: Cluster, patterns: IntArray) -> npt.NDArray[np.float64]:
    """Bus bandwidth of a hierarchical ring that the host with the fewest network cards holds back.

    ``T0(c) = min_h w_h * (n - 1)/n * m/(m - 1)`` for n GPUs on m hosts, w_h the `host_rates`.

    Parameters
    ----------
    cluster
        Its host types give network cards and their rate.
    patterns
        Falling counts with zeros behind, shape (n, m).

    Returns
    -------
    Array, shape (n,)
        kB/s; infinite on a single host, 0 for less than two GPUs.
    """
    given = np.asarray(patterns, np.int64)
    rates = host_rates(cluster)
    gpus, hosts = given.sum(axis=1), (given > 0).sum(axis=1)
    least = np.where(given > 0, rates[given], np.inf).min(axis=1, initial=np.inf)
    prior = np.full(len(given), np.inf)
    prior[gpus <= 1] = 0.0
    several = hosts >= 2
    n, m = gpus[several], hosts[several]
    prior[several] = least[several] * ((n - 1) / n) * (m / (m - 1))
    return prior
