"""The learned surrogate of the BandPilot paper: a small transformer over the hosts of a set."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.models.measurements import MeasurementTable
from optsched.bandwidth.models.model import BandwidthModel
from optsched.bandwidth.models.surrogate_tokens import (
    COUNT,
    Samples,
    Scaling,
    intra_tables,
    samples_of,
    tokens_of,
)
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    import numpy.typing as npt

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.models.surrogate_network import SurrogateNetwork
    from optsched.bandwidth.models.surrogate_training import Epoch
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.intra import IntraTable
    from optsched.model.schedule import IntArray

EPOCHS: Final = 350
MOST_USED: Final = 256
"""Hosts of a set that the network takes: attention grows with their square."""

_CHUNK: Final = 384
_ROUND: Final = 32
"""Samples are filled up to a multiple: then the bits of one do not depend on the others."""
_PAIRS: Final = 32 * _CHUNK


class HierarchicalTransformer(BandwidthModel):
    """B(S) in two stages: tables within one host, a transformer across hosts.

    Every used host is a token of the bandwidth within it that exactly its GPUs reach, their number,
    and whether there is only one; the total number joins after pooling. Hosts have no order and no
    names, so their permutation changes nothing, and nor do hosts that are not used. Trained on the
    logarithm of measured bandwidths: Zhang et al., BandPilot, arXiv 2506.15595, section 4.

    Instances are values: made by `fit`, `update` or `load`, never changed.
    """

    intra_monotone = False

    def __init__(
        self,
        cluster: Cluster,
        intra: tuple[IntraTable, ...],
        scaling: Scaling,
        weights: Mapping[str, npt.NDArray[np.float32]],
        samples: Samples,
        *,
        op: str = "all_reduce",
        payload: int | None = None,
        mixed: bool = False,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self.intra = intra
        self.scaling = scaling
        self.weights = dict(weights)
        self.samples = samples
        self.op, self.payload, self.mixed = op, payload, mixed
        self.seed = seed
        arrays: tuple[npt.NDArray[Any], ...] = (*self.weights.values(), *samples)
        for array in arrays:
            array.flags.writeable = False

    @classmethod
    def fit(
        cls,
        cluster: Cluster,
        table: MeasurementTable,
        *,
        intra: Mapping[str, IntraTable] | None = None,
        seed: int = 0,
        epochs: int = EPOCHS,
        validation: float = 0.0,
        threads: int | None = None,
        on_progress: Callable[[Epoch], None] | None = None,
    ) -> HierarchicalTransformer:
        """Train on measurements across hosts; those on one host are left to the intra tables.

        Parameters
        ----------
        cluster
            Whose GPUs they are.
        table
            Measurements. Those seen beside other traffic teach only that the bandwidth is not
            lower. Where the GPUs are not known, they are taken for average ones.
        intra
            Bandwidths within a host by name of its type; by default those of the types, and
            where a type has none the stand-ins of `optsched.bandwidth.models.fallback`.
        seed
            Same seed, same measurements in any order: same bits.
        epochs
            At most.
        validation
            Share of the patterns (not of the samples) that training does not see: its weights are
            then those of the epoch that predicts them best, and it ends when none was better for
            80 epochs. 0 = learn from everything, for all epochs.
        threads
            Of torch, by default one, which is the fastest. torch's own number stays as it is, and
            so does its random generator.
        on_progress
            Called after every epoch.

        Raises
        ------
        MissingExtra
            torch is not installed.
        InputError
            No measurement across hosts, or one that does not fit the cluster.
        """
        training = torch_part("surrogate_training")
        integer("seed", seed, 0, 2**63 - 1)
        integer("epochs", epochs, 1, 10**6)
        integer("threads", 1 if threads is None else threads, 1, 1024)
        if not isinstance(validation, (int, float)) or not 0 <= validation < 1:
            raise InputError(f"validation: expected a share in 0..1, got {validation!r:.60}")
        tables = intra_tables(cluster, intra, table.rows)
        samples = samples_of(cluster, tables, table.rows)
        if not len(samples.values):
            raise InputError("table: expected at least one measurement across hosts, got none")
        scaling = Scaling.of(samples)
        weights = training.train(
            samples, scaling, seed, epochs, float(validation), threads or 1, on_progress
        )
        about: dict[str, Any] = {"op": table.op, "payload": table.payload, "mixed": table.mixed}
        return cls(cluster, tables, scaling, weights, samples, seed=seed, **about)

    def predict(self, selection: Selection) -> IntArray:
        """B(S) of every row; see `BandwidthModel.predict`.

        Across hosts what the network says, rounded to kB/s; equal sets of tokens are asked once.
        Other processors and versions of torch may differ in the last of seven digits.

        Raises
        ------
        InputError
            Another shape or dtype, or a set on more than 256 hosts.
        """
        given = self.checked(selection)
        tokens = tokens_of(self.cluster, self.intra, given)
        used = (tokens > 0).sum(axis=1)
        if tokens.shape[1] > MOST_USED:
            raise InputError(f"selection: expected at most {MOST_USED} hosts in a set")
        values = np.where(used == 1, tokens[:, 0] % COUNT, 0)
        for m in range(2, tokens.shape[1] + 1):
            rows = np.flatnonzero(used == m)
            if len(rows):
                distinct, where = np.unique(tokens[rows, :m], axis=0, return_inverse=True)
                values[rows] = self._across(distinct)[where.reshape(-1)]
        return values

    def update(self, measurements: Iterable[Measurement]) -> HierarchicalTransformer:
        """A model trained on with these measurements too; the same model if there are none.

        Fine-tuning that replays old measurements and holds on to weights that they need (elastic
        weight consolidation: Kirkpatrick et al. 2017). Scaling and validation stay as they were.

        Raises
        ------
        InputError
            As in `fit`; `MixedMeasurements` for another collective or payload.
        """
        own = MeasurementTable((), self.op, self.payload, self.mixed)
        more = own.with_rows(measurements)
        own.joined(more, mixed=self.mixed or more.mixed)
        new = samples_of(self.cluster, self.intra, more.rows)
        if not len(new.values):
            return self
        training = torch_part("surrogate_training")
        weights = training.tune(self.weights, self.scaling, self.samples, new, self.seed)
        return HierarchicalTransformer(
            self.cluster,
            self.intra,
            self.scaling,
            weights,
            self.samples.joined(new),
            op=self.op,
            payload=self.payload,
            mixed=self.mixed or more.mixed,
            seed=self.seed,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.transformer/1``, and a file ``.npz`` of weights beside it."""
        from optsched.bandwidth.models.surrogate_files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], cluster: Cluster) -> HierarchicalTransformer:
        """Read what `save` wrote.

        Raises
        ------
        InputError
            Files that cannot be read, do not belong together, or are for another cluster.
        """
        from optsched.bandwidth.models.surrogate_files import load

        return load(path, cluster)

    def __repr__(self) -> str:
        return f"<HierarchicalTransformer of {len(self.samples.values)} measurements>"

    @cached_property
    def _network(self) -> SurrogateNetwork:
        training = torch_part("surrogate_training")
        network: SurrogateNetwork = training.network_of(self.weights)
        return network

    def _across(self, tokens: IntArray) -> IntArray:
        """What the network says of sets that all use the same number of hosts."""
        forward = torch_part("surrogate_network").forward
        n, m = tokens.shape
        size = max(_ROUND, min(_CHUNK, _PAIRS // m**2 // _ROUND * _ROUND))
        filled = np.pad(tokens, ((0, -n % _ROUND), (0, 0)), mode="edge")
        hosts, total = self.scaling.read(filled)
        parts = [
            forward(self._network, hosts[..., i : i + size], total[i : i + size])
            for i in range(0, len(filled), size)
        ]
        predicted = self.scaling.bandwidth(np.concatenate(parts)[:n])
        if np.isnan(predicted).any():
            raise InputError("weights: give no numbers for some sets: fit the model anew")
        return np.rint(np.clip(predicted, 1, MOST - 1)).astype(np.int64)


def torch_part(name: str) -> ModuleType:
    """A module that imports torch."""
    from importlib import import_module

    try:
        import_module("torch")
    except ImportError:
        raise MissingExtra("the learned surrogate", "torch") from None
    return import_module(f"optsched.bandwidth.models.{name}")
