"""The ablation of the learned surrogate: GPUs by number, and nothing about hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.measured import check_patterns
from optsched.bandwidth.model import BandwidthModel
from optsched.bandwidth.rates import MOST
from optsched.bandwidth.surrogate import torch_part
from optsched.bandwidth.surrogate_tokens import moments, scaled
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.measurements import MeasurementTable
    from optsched.bandwidth.model import Selection
    from optsched.model.schedule import IntArray

EPOCHS: Final = 400

_ROUND: Final = 32


class NaiveSurrogate(BandwidthModel):
    """B(S) of a small network over the bits of S; there to show what the hosts are worth.

    Sets on one host are predicted too, instead of looked up. Made by `fit`.
    """

    intra_monotone = False

    def __init__(
        self, cluster: Cluster, network: Any, scaling: tuple[float, float], table: MeasurementTable
    ) -> None:
        self.cluster = cluster
        self.op, self.payload = table.op, table.payload
        self._network = network
        self._scaling = scaling

    @classmethod
    def fit(
        cls, cluster: Cluster, table: MeasurementTable, *, seed: int = 0, epochs: int = EPOCHS
    ) -> NaiveSurrogate:
        """Train on measurements that name their GPUs; those beside other traffic are left out.

        Parameters
        ----------
        cluster
            Whose GPUs they are.
        table
            Measurements.
        seed
            Same seed, same measurements in any order: same bits.
        epochs
            Passes over the measurements.

        Raises
        ------
        MissingExtra
            torch is not installed.
        InputError
            A measurement that names no GPUs, or others than the cluster has; or none at all.
        """
        training = torch_part("surrogate_training")
        integer("seed", seed, 0, 2**63 - 1)
        integer("epochs", epochs, 1, 10**6)
        check_patterns(cluster, table)
        chosen, values = [], []
        for i, row in enumerate(table):
            if row.censored or sum(row.pattern) < 2:
                continue
            if not row.gpus or row.value == 0:
                raise InputError(
                    f"measurements[{i}]: expected the GPUs that were measured and more than 0 kB/s"
                )
            bits = np.zeros(cluster.n_gpus, np.bool_)
            for name, ids in row.gpus:
                bits[int(cluster.first[cluster.host_index(name)]) + np.array(ids)] = True
            if bits.sum() < sum(row.pattern) or len({name for name, _ in row.gpus}) < len(row.gpus):
                raise InputError(
                    f"measurements[{i}].gpus: a host or one of its GPUs is given twice"
                )
            chosen.append(bits)
            values.append(row.value)
        if not values:
            raise InputError("table: expected at least one measurement of two GPUs or more")
        sets, logs = np.array(chosen), np.log(np.array(values))
        order = np.lexsort((logs, *sets.T))
        scaling = moments(logs)
        targets = scaled(logs[order], scaling).astype(np.float32)
        return cls(
            cluster, training.train_naive(sets[order], targets, seed, epochs), scaling, table
        )

    def predict(self, selection: Selection) -> IntArray:
        """B(S) of every row; see `BandwidthModel.predict`."""
        given = self.checked(selection)
        forward = torch_part("surrogate_network").forward
        n = len(given)
        filled = np.pad(given, ((0, -n % _ROUND), (0, 0)))
        bits = np.ascontiguousarray(filled.T[:, None, :], np.float32)
        outputs = forward(self._network, bits, np.zeros(len(filled), np.float32))[:n]
        mean, deviation = self._scaling
        predicted = np.exp(outputs.astype(np.float64) * deviation + mean)
        values = np.rint(np.clip(predicted, 1, MOST - 1)).astype(np.int64)
        return np.where(given.sum(axis=1) > 1, values, 0)
