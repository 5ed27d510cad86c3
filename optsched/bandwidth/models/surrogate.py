"""The learned surrogate of the BandPilot paper: a small transformer over the hosts of a set."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.fallback import assumptions, intra_estimate
from optsched.bandwidth.models.model import BandwidthModel
from optsched.bandwidth.models.surrogate_tokens import (
    COUNT,
    Scaling,
    gpu_tokens_of,
    samples_of,
    tokens_of,
)
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer, one_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    import numpy.typing as npt

    from optsched.bandwidth.models.measurements import MeasurementTable
    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.models.surrogate_network import SurrogateNetwork
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

EPOCHS: Final = 350
VARIANTS: Final = ("hierarchical", "naive")
MOST_USED: Final = 256
"""Tokens of a set that the network takes: attention grows with their square."""

_TOGETHER: Final = 64
"""Sets in every batch: so the bits of a prediction do not depend on the other sets."""


class HierarchicalTransformer(BandwidthModel):
    """B(S) in two stages: tables within one host, a transformer across hosts.

    Every used host is a token of the bandwidth within it that exactly its GPUs reach, their number,
    and whether there is only one; the total number joins after pooling. Hosts have no order and no
    names, so their permutation changes nothing, and nor do hosts that are not used. Trained on the
    logarithm of measured bandwidths: Zhang et al., BandPilot, arXiv 2506.15595, section 4.

    The variant ``"naive"`` (Table III there) is for comparison: a token for every GPU, with the
    numbers of its host, of itself and of its host type, and no sums over the GPUs of a host.

    Instances are values: made by `fit`, never changed; more measurements are a new fit. They can be
    pickled.

    Examples
    --------
    >>> from optsched.bandwidth import HierarchicalTransformer, synthetic
    >>> cluster = synthetic.cluster("nvswitch", 2)
    >>> HierarchicalTransformer.fit(cluster, synthetic.network(cluster), epochs=1)
    <HierarchicalTransformer for <Cluster '': 2 hosts, 16 GPUs>>
    """

    intra_monotone = False

    def __init__(
        self,
        cluster: Cluster,
        scaling: Scaling,
        weights: Mapping[str, npt.NDArray[np.float32]],
        like: MeasurementTable,
    ) -> None:
        self.cluster = cluster
        self.intra = _intra(cluster)
        self.scaling = scaling
        self.weights = dict(weights)
        self.op, self.payload, self.mixed = like.op, like.payload, like.mixed
        self.assumed = tuple(assumptions(cluster, across=True))
        for array in self.weights.values():
            array.flags.writeable = False

    @classmethod
    def fit(
        cls, cluster: Cluster, table: MeasurementTable, *, seed: int = 0, epochs: int = EPOCHS,
        variant: str = "hierarchical",
    ) -> HierarchicalTransformer:  # fmt: skip
        """Train on measurements across hosts; runs on one host are left to the intra tables.

        Parameters
        ----------
        cluster
            The cluster; types without an intra table have that of `models.fallback`.
        table
            Measurements. Runs beside other traffic are lower bounds. Unknown GPUs are taken for
            average GPUs of their hosts.
        seed
            Same seed, same measurements in any order: same bits. torch's own random generator and
            number of threads stay as they are.
        epochs
            Passes over all measurements.
        variant
            ``"hierarchical"`` or ``"naive"``.

        Raises
        ------
        MissingExtra
            torch is not installed.
        InputError
            No measurement across hosts, or one that does not fit the cluster.
        """
        training = _torch_part()
        integer("seed", seed, 0, 2**63 - 1)
        integer("epochs", epochs, 1, 10**6)
        naive = one_of("variant", variant, VARIANTS) == "naive"
        samples = samples_of(cluster, _intra(cluster), table, naive)
        if not len(samples.values):
            raise InputError("table: expected at least one measurement across hosts, got none")
        scaling = Scaling.of(samples, cluster if naive else None)
        weights = training.train(samples, scaling, seed, epochs)
        return cls(cluster, scaling, weights, table)

    def predict(self, selection: Selection) -> IntArray:
        """Predict B(S) of every row; see `BandwidthModel.predict`.

        Across hosts the output of the network, rounded to kB/s; equal sets of tokens are predicted
        once. Other processors and versions of torch may differ in the last of seven digits.
        """
        given = self.checked(selection)
        tokens = tokens_of(self.cluster, self.intra, given)
        several = (tokens > 0).sum(axis=1) > 1
        values = np.where(several, 0, tokens[:, 0] % COUNT)
        if self.scaling.features is not None:
            tokens = gpu_tokens_of(given)
        if tokens.shape[1] > MOST_USED:
            raise InputError(
                f"selection: expected at most {MOST_USED} hosts (naive: GPUs) in a set"
            )
        used = (tokens > 0).sum(axis=1)
        for m in range(2, tokens.shape[1] + 1):
            rows = np.flatnonzero(several & (used == m))
            if len(rows):
                distinct, where = np.unique(tokens[rows, :m], axis=0, return_inverse=True)
                values[rows] = self._across(distinct)[where.reshape(-1)]
        return values

    def __repr__(self) -> str:
        return f"<HierarchicalTransformer for {self.cluster!r}>"

    @cached_property
    def _network(self) -> SurrogateNetwork:
        network: SurrogateNetwork = _torch_part().network_of(self.weights)
        return network

    def _across(self, tokens: IntArray) -> IntArray:
        """Predictions for sets with the same number of tokens."""
        n = len(tokens)
        filled = np.pad(tokens, ((0, -n % _TOGETHER), (0, 0)), mode="edge")
        found = _torch_part().outputs(self._network, self.scaling, filled, _TOGETHER)
        predicted = self.scaling.bandwidth(found[:n])
        if np.isnan(predicted).any():
            raise InputError("weights: give no numbers for some sets: fit the model anew")
        return np.rint(np.clip(predicted, 1, MOST - 1)).astype(np.int64)


def _torch_part() -> ModuleType:
    """The module that imports torch."""
    try:
        import_module("torch")
    except ImportError:
        raise MissingExtra("the learned surrogate", "torch") from None
    return import_module("optsched.bandwidth.models.surrogate_network")


def _intra(cluster: Cluster) -> tuple[IntraTable, ...]:
    """Bandwidths within a host, by type; where they are not measured, those of the links."""
    return tuple(
        IntraTable(kind.gpus, intra_estimate(cluster, t, ()))
        for t, kind in enumerate(cluster.types)
    )
