"""Cost profiles: published sizes of the models, exact partition, and sane, exact fields."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import JobArray
from optsched.errors import InputError
from optsched.pipelines.cuts import naive
from optsched.pipelines.models import MODELS, Layer, model_of
from optsched.pipelines.profiles import bytes_of, forward_time, job_array_fields, stages_of

NAMES = st.sampled_from(sorted(MODELS))


# models


@pytest.mark.parametrize(("name", "published"), [("vgg19", 143_667_240), ("resnet152", 60_192_808)])
def test_parameters_of_convolutional_nets(name: str, published: int) -> None:
    """All weights, biases and norms are counted: the number is exact."""
    assert model_of(name).params == published


@pytest.mark.parametrize(
    ("name", "published"), [("bert_large", 335_141_888), ("gpt2_xl", 1_557_611_200)]
)
def test_parameters_of_transformers(name: str, published: int) -> None:
    """Biases, norms and BERT's pooler are left out: 0.5 % below the published number at most."""
    params = model_of(name).params
    assert 0.995 * published < params < published


@pytest.mark.parametrize(("name", "gflops"), [("vgg19", 39.3), ("resnet152", 23.0)])
def test_work_of_convolutional_nets(name: str, gflops: float) -> None:
    """Twice the published multiply-adds (19.6 and 11.5 G), which are rounded to 1 %."""
    assert model_of(name).flops / 1e9 == pytest.approx(gflops, rel=0.01)


# partition


@given(st.integers(1, 60), st.data())
def test_naive_counts_differ_by_one(layers: int, data: st.DataObject) -> None:
    """Equal layer counts, as far as they divide."""
    stages = data.draw(st.integers(1, layers))
    counts = {b - a for a, b in pairwise(naive(layers, stages))}
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


@given(NAMES, st.integers(1, 19), st.sampled_from(["balanced", "naive"]))
def test_stages_lose_nothing(name: str, stages: int, partition: str) -> None:
    """Stages hold every layer once, boundaries fit together, tied copies come on top."""
    model = model_of(name)
    parts = stages_of(model, stages, 16, partition)
    assert tuple(layer for part in parts for layer in part.layers) == model.layers
    copies = model.layers[-1].tied_params if stages > 1 else 0
    assert sum(part.params for part in parts) == model.params + copies
    assert parts[0].in_bytes == model.input_bytes
    assert all(a.out_bytes == b.in_bytes for a, b in pairwise(parts))


# cost model


def test_forward_time_by_hand() -> None:
    """Compute-bound, memory-bound and empty layers, with the numbers of an A100."""
    gpt = model_of("gpt2_xl")
    assert forward_time(Layer("x", 70_200_000, 0, 0, 0), gpt, 8) == 8.5 + 60
    assert forward_time(Layer("x", 0, 0, 500_000, 0), gpt, 8) == 8 + 60
    assert forward_time(Layer("x", 0, 0, 0, 0), gpt, 8) == 60


def test_fields_by_hand() -> None:
    """One stage of GPT-2 XL, recomputed here from its layers; rounding is up."""
    fields = job_array_fields("gpt2_xl", 2, [8, 16], link="pcie", switch=True)
    model = model_of("gpt2_xl")
    first = stages_of(model, 2, 16)[0]
    exact = sum(forward_time(layer, model, 8) for layer in first.layers)
    assert fields["forward"][0, 0] == ceil(exact)
    assert fields["backward"][0, 0] == ceil(2 * exact)
    boundary = 2 * 1024 * 1600
    assert fields["lag_forward"].tolist() == [[ceil(8 * boundary / 64_000 + 15)],
                                              [ceil(16 * boundary / 64_000 + 15)]]  # fmt: skip
    assert fields["activation"][1, 0] == 16 * sum(layer.kept_bytes for layer in first.layers)
    assert fields["checkpoint"].tolist() == [[8 * 8192, 8 * boundary], [16 * 8192, 16 * boundary]]
    assert fields["state"][0, 0] == 8 * first.params
    assert fields["switch"][0, 0] == ceil(8 * first.params / 150_000)
    assert fields["update"][0, 0] == ceil(16 * first.params / 1_500_000)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_arrays_of_the_paper(name: str) -> None:
    """`JobArray.from_profile` takes the fields; same call, same array; every job fits."""
    batches = [128, 256, 512, 768] if name in ("vgg19", "resnet152") else [8, 16, 24, 32]
    arguments: Any = {"link": "mixed", "memory": "80GB", "switch": True, "recompute_mode": "always"}
    array = JobArray.from_profile(name, 8, batches * 2, **arguments)
    assert array == JobArray.from_profile(name, 8, batches * 2, **arguments)
    assert (array.n_jobs, array.n_stages, array.time_unit) == (8, 8, "us")
    assert array.infeasibility() == ""
    assert array.lower_bound() >= int((array.forward + array.backward).sum(axis=0).max())


def test_memory_is_what_two_state_buffers_leave() -> None:
    """The whole device minus twice the stage's state; unlimited stays unlimited."""
    fields = job_array_fields("gpt2_xl", 4, [8], memory="80GB")
    assert fields["memory"] == [80 * 2**30 - 2 * s for s in fields["state"][0].tolist()]
    assert job_array_fields("gpt2_xl", 4, [8])["memory"] == [0] * 4
    assert bytes_of("80GB") == bytes_of("80 GiB") == bytes_of(80 * 2**30) == 85_899_345_920
    assert bytes_of("512MiB") == 2**29


def test_mixed_links() -> None:
    """Every fourth cut is InfiniBand, and devices are grouped in servers of four."""
    fields = job_array_fields("gpt2_xl", 9, [8], link="mixed")
    lags = fields["lag_forward"][0].tolist()
    assert [lag > min(lags) for lag in lags] == [False, False, False, True] * 2
    assert fields["servers"] == tuple(f"server{v // 4}" for v in range(9))


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"model": "vgg16"}, 'model: expected one of vgg19, .*got "vgg16"'),
    ({"stages": 51}, r"stages: .*1\.\.50, got 51"),
    ({"batch_sizes": 8}, "batch_sizes: expected a list of integers, got 8"),
    ({"batch_sizes": [2**53]}, r"batch_sizes: a block needs \d+ microseconds or bytes, above 2"),
    (
        {"batch_sizes": [9], "micro_batches": 2},
        r"batch_sizes\[0\]: 9 is no multiple of 2 micro-batches",
    ),
    ({"link": "ethernet"}, 'link: expected one of nvlink, .*got "ethernet"'),
    (
        {"memory": "80 gigs"},
        r'a size such as "80GB" \(GB, GiB, MB, MiB\), got "80 gigs"',
    ),
    ({"memory": "1GB"}, "memory: 1073741824 bytes leave nothing for activations on device 0"),
]


def test_hostile_arguments() -> None:
    """Every bad argument is refused with its place, value and range."""
    for arguments, message in HOSTILE:
        full: dict[str, Any] = {"model": "gpt2_xl", "stages": 4, "batch_sizes": [8, 16]}
        with pytest.raises(InputError, match=message):
            job_array_fields(**full | arguments)
