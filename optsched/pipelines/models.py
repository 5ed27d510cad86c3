"""The four models as chains of layers: work, parameters and bytes per sample."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable

_FP32, _FP16 = 4, 2


@dataclass(frozen=True)
class Layer:
    """One layer; all numbers are per sample, except the parameters.

    Parameters
    ----------
    flops
        Floating-point operations of the forward pass (a multiply-add counts 2).
    params
        Trainable parameters, counted once in the model.
    out_bytes
        Bytes it hands to the next layer; what crosses a cut of the pipeline.
    kept_bytes
        Bytes kept from the forward to the backward pass.
    tied_params
        Parameters of another layer that it needs a copy of if it lives on another device.
    weight_kept
        Bytes that stay until the weight gradient if the backward pass is split; None: all that are
        kept, as in convolutions, where they are the inputs and the gradients of the outputs.
    """

    name: str
    flops: int
    params: int
    out_bytes: int
    kept_bytes: int
    tied_params: int = 0
    weight_kept: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes that stay from the input gradient to the weight gradient."""
        return self.kept_bytes if self.weight_kept is None else self.weight_kept


@dataclass(frozen=True)
class Model:
    """A chain of layers and how well small batches use the device.

    Parameters
    ----------
    layers
        In order of the forward pass.
    half_batch
        Batch size at which half of the attainable speed is reached (beta_1/2).
    input_bytes
        Bytes of one input sample.
    state_bytes
        Bytes of model state per parameter that move when a device changes the job.
    """

    name: str
    layers: tuple[Layer, ...]
    half_batch: Fraction
    input_bytes: int
    state_bytes: int

    @property
    def params(self) -> int:
        """Trainable parameters of the model."""
        return sum(layer.params for layer in self.layers)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)


@cache
def model_of(name: str) -> Model:
    """Return the model of this name; `InputError` lists the names there are."""
    if name not in MODELS:
        raise InputError(f"model: expected one of {', '.join(MODELS)}, got {format_value(name)}")
    return MODELS[name]()


def vgg19() -> Model:
    """VGG-19 (Simonyan & Zisserman 2015) at 224 x 224: 16 convolutions, 3 linear layers."""
    layers, channels, side = [], 3, 224
    for block, (width, depth) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), 1):
        for i in range(depth):
            elements = width * side * side
            pooled = elements // 4 if i == depth - 1 else elements
            layers.append(
                Layer(
                    f"conv{block}_{i + 1}",
                    flops=2 * 9 * channels * elements,
                    params=(9 * channels + 1) * width,
                    out_bytes=_FP32 * pooled,
                    kept_bytes=8 * elements,
                )
            )
            channels = width
        side //= 2
    inputs = channels * side * side
    for i, outputs in enumerate((4096, 4096, 1000), 1):
        layers.append(_linear(f"fc{i}", inputs, outputs))
        inputs = outputs
    return Model("vgg19", tuple(layers), Fraction(24), _FP32 * 3 * 224 * 224, 8)


def resnet152() -> Model:
    """ResNet-152 (He et al. 2016) at 224 x 224: stem, 3-8-36-3 bottlenecks, head."""
    stem = 64 * 112 * 112
    layers = [
        Layer(
            "stem",
            flops=2 * 49 * 3 * stem,
            params=49 * 3 * 64 + 2 * 64,
            out_bytes=_FP32 * stem // 4,
            kept_bytes=8 * stem,
        )
    ]
    channels, side = 64, 56
    for block, (width, depth) in enumerate(((64, 3), (128, 8), (256, 36), (512, 3)), 2):
        for i in range(depth):
            stride = 2 if i == 0 and block > 2 else 1
            layers.append(_bottleneck(f"conv{block}_{i + 1}", channels, width, side, stride))
            channels, side = 4 * width, side // stride
    layers.append(_linear("head", channels, 1000))
    return Model("resnet152", tuple(layers), Fraction(32), _FP32 * 3 * 224 * 224, 8)


def bert_large() -> Model:
    """BERT-large (Devlin et al. 2019), sequences of 128 tokens, masked-language-model head."""
    layers = _transformer(hidden=1024, sequence=128, depth=24, heads=16, vocabulary=30522,
                          extra_rows=512 + 2)  # fmt: skip
    return Model("bert_large", layers, Fraction(2), 8 * 128, 4)


def gpt2_xl() -> Model:
    """GPT-2 XL (Radford et al. 2019), sequences of 1024 tokens."""
    layers = _transformer(hidden=1600, sequence=1024, depth=48, heads=25, vocabulary=50257,
                          extra_rows=1024)  # fmt: skip
    return Model("gpt2_xl", layers, Fraction(1, 2), 8 * 1024, 8)


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(
        name,
        flops=2 * inputs * outputs,
        params=(inputs + 1) * outputs,
        out_bytes=_FP32 * outputs,
        kept_bytes=8 * outputs,
    )


def _bottleneck(name: str, channels: int, width: int, side: int, stride: int) -> Layer:
    """1x1, 3x3 (with the stride), 1x1 to four times the width; a projection where sizes change."""
    out = side // stride
    weights = channels * width + 9 * width * width + 4 * width * width
    work = channels * width * side * side + (9 + 4) * width * width * out * out
    norms = 2 * (width + width + 4 * width)
    if channels != 4 * width:
        weights += channels * 4 * width
        work += channels * 4 * width * out * out
        norms += 2 * 4 * width
    return Layer(
        name,
        flops=2 * work,
        params=weights + norms,
        out_bytes=_FP32 * 4 * width * out * out,
        kept_bytes=64 * width * out * out,
    )


def _transformer(
    *, hidden: int, sequence: int, depth: int, heads: int, vocabulary: int, extra_rows: int
) -> tuple[Layer, ...]:
    """Embedding, `depth` equal layers, and a head that shares the embedding's matrix.

    Activations of a layer: 34 s h + 5 a s^2 bytes (Korthikanti et al. 2022, eq. 1); biases and
    normalisation are left out of the parameters (12 h^2 a layer). Of those bytes 32 s h stay for
    the weight gradient (Qi et al. 2024, section 2.3), of the head its inputs and output gradients.
    """
    h, s = hidden, sequence
    boundary = _FP16 * s * h
    embedding = Layer("embedding", 0, (vocabulary + extra_rows) * h, boundary, s * h)
    layers = [
        Layer(
            f"layer{i}",
            flops=24 * s * h * h + 4 * s * s * h,
            params=12 * h * h,
            out_bytes=boundary,
            kept_bytes=34 * s * h + 5 * heads * s * s,
            weight_kept=32 * s * h,
        )
        for i in range(depth)
    ]
    head = Layer(
        "head",
        flops=2 * s * h * vocabulary,
        params=0,
        out_bytes=_FP16 * s * vocabulary,
        kept_bytes=6 * s * vocabulary,
        tied_params=vocabulary * h,
        weight_kept=_FP16 * s * (h + vocabulary),
    )
    return (embedding, *layers, head)


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "vgg19": vgg19,
    "resnet152": resnet152,
    "bert_large": bert_large,
    "gpt2_xl": gpt2_xl,
}
