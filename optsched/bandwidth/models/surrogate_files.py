"""The learned surrogate as two files: a JSON document, and its arrays beside it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from optsched.bandwidth.models.model import OPERATIONS
from optsched.bandwidth.models.surrogate_tokens import COUNT, Samples, Scaling
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.files import check_writable, read_bytes, read_text, unpack_arrays, write_atomic
from optsched.io.strict_json import check_format, decode, format_json, parse

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from optsched.bandwidth.models.surrogate import HierarchicalTransformer
    from optsched.bandwidth.topology.cluster import Cluster

    Arrays = dict[str, npt.NDArray[Any]]

FORMAT: Final = "optsched.transformer/1"
MOST_BYTES: Final = 2**28
"""Of the arrays once unpacked: far above any honest file."""

_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Moments = tuple[float, Annotated[float, msgspec.Meta(gt=0)]]


class _Scaling(msgspec.Struct, forbid_unknown_fields=True):
    intra: _Moments
    count: _Moments
    total: _Moments
    value: _Moments


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    cluster: str
    cluster_sha256: _Hash
    op: str
    payload: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None
    mixed: bool
    seed: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}$")]
    """As text: it may be beyond 2^53."""
    scaling: _Scaling
    arrays: str
    """Name of the file beside the document."""
    arrays_sha256: _Hash


def save(model: HierarchicalTransformer, path: str | os.PathLike[str]) -> None:
    """Write both files; the document comes last, so that what it names is there."""
    beside = Path(path).with_suffix(".npz")
    if beside == Path(path):
        raise InputError(f"{path}: is the name of the weights; name the document, such as x.json")
    check_writable(path)
    arrays: Arrays = {f"weights/{name}": value for name, value in model.weights.items()}
    arrays |= {f"intra/{t}": table.values for t, table in enumerate(model.intra)}
    arrays |= {f"samples/{name}": part for name, part in model.samples._asdict().items()}
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    content = stream.getvalue()
    document = _Document(
        format=FORMAT,
        cluster=model.cluster.name,
        cluster_sha256=model.cluster.sha256,
        op=model.op,
        payload=model.payload,
        mixed=model.mixed,
        seed=str(model.seed),
        scaling=msgspec.convert(model.scaling, _Scaling, from_attributes=True),
        arrays=beside.name,
        arrays_sha256=hashlib.sha256(content).hexdigest(),
    )
    write_atomic(beside, content)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def load(path: str | os.PathLike[str], cluster: Cluster) -> HierarchicalTransformer:
    """Read both files; see `HierarchicalTransformer.load`."""
    from optsched.bandwidth.models.surrogate import HierarchicalTransformer

    name = str(path)
    tree = parse(read_text(path), name)
    check_format(tree, FORMAT, name)
    document = decode(tree, _Document, name)
    if document.cluster_sha256 != cluster.sha256:
        raise InputError(
            f"{name}: is for another cluster than {cluster.name!r:.60} (it was saved for "
            f"{format_json(document.cluster)}, hash {document.cluster_sha256[:12]}...): fit it anew"
        )
    if document.op not in OPERATIONS:
        raise InputError(f"{name}: op: expected one of {', '.join(OPERATIONS)}, got {document.op}")
    if Path(document.arrays).name != document.arrays or document.arrays in ("", ".", ".."):
        raise InputError(
            f"{name}: arrays: expected the name of a file beside it, got "
            f"{format_json(document.arrays)}"
        )
    beside = Path(path).parent / document.arrays
    content = read_bytes(beside)
    if hashlib.sha256(content).hexdigest() != document.arrays_sha256:
        raise InputError(
            f"{beside}: does not belong to {name}: its sha256 is not the one named there; "
            "copy both files of one save"
        )
    arrays = unpack_arrays(content, str(beside), MOST_BYTES)
    reader = _Reader(arrays, str(beside))
    weights = reader.weights()
    intra = tuple(reader.intra(t, kind.gpus) for t, kind in enumerate(cluster.types))
    samples = reader.samples(cluster)
    reader.finish()
    scale = document.scaling
    return HierarchicalTransformer(
        cluster,
        intra,
        Scaling(scale.intra, scale.count, scale.total, scale.value),
        weights,
        samples,
        op=document.op,
        payload=document.payload,
        mixed=document.mixed,
        seed=int(document.seed),
    )


class _Reader:
    """Takes the arrays one by one, each of the type and shape that it must have."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        self._arrays = dict(arrays)
        self._name = name

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        from optsched.bandwidth.models.surrogate import torch_part

        network = torch_part("surrogate_network").SurrogateNetwork()
        found = {
            key: self._take(f"weights/{key}", np.float32, tuple(p.shape))
            for key, p in network.named_parameters()
        }
        for key, value in found.items():
            if not np.isfinite(value).all():
                raise InputError(f"{self._name}: weights/{key}: expected finite numbers")
        return found

    def intra(self, t: int, gpus: int) -> IntraTable:
        try:
            return IntraTable(gpus, self._take(f"intra/{t}", np.int64, (None,)))
        except InputError as error:
            raise InputError(f"{self._name}: intra/{t}: {error}") from None

    def samples(self, cluster: Cluster) -> Samples:
        tokens = self._take("samples/tokens", np.int64, (None, None))
        values = self._take("samples/values", np.int64, (len(tokens),))
        censored = self._take("samples/censored", np.bool_, (len(tokens),))
        most = int(cluster.sizes.max())
        right = (
            len(tokens) > 0
            and 0 < tokens.shape[1] <= cluster.n_hosts
            and bool((tokens >= 0).all())
            and bool((tokens // COUNT <= most).all())
            and bool((tokens[:, 0] > 0).all())
            and bool((tokens[:, 1:] <= tokens[:, :-1]).all())
            and bool(((values > 0) & (values < MOST)).all())
        )
        if not right:
            raise InputError(f"{self._name}: samples: are no measurements of this cluster")
        return Samples(tokens, values, censored)

    def finish(self) -> None:
        """Refuse arrays that nobody asked for."""
        for key in self._arrays:
            raise InputError(f"{self._name}: there is an array too many, {key!r:.60}")

    def _take(
        self, key: str, dtype: type[np.generic], shape: tuple[int | None, ...]
    ) -> npt.NDArray[Any]:
        found = self._arrays.pop(key, None)
        if found is None:
            raise InputError(f"{self._name}: the array {key!r:.60} is missing")
        fits = len(found.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, found.shape, strict=True)
        )
        if found.dtype != np.dtype(dtype) or not fits:
            wanted = "x".join("n" if size is None else str(size) for size in shape)
            raise InputError(
                f"{self._name}: {key}: expected {np.dtype(dtype)} of shape {wanted}, "
                f"got {found.dtype} of shape {'x'.join(map(str, found.shape))}"
            )
        return found
