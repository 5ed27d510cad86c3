"""The entropy meter against sums by hand, in any shape and precision."""

from __future__ import annotations

import importlib
import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from optsched import InputError, MissingExtra  # noqa: E402
from optsched.elastic import EntropyMeter  # noqa: E402


def by_hand(logits: Any, keep: Any) -> tuple[float, float, int]:
    """Mean normalised entropy, mean ambiguity and count, of classes in the last axis."""
    h, q = [], []
    for z in logits.double().reshape(-1, logits.shape[-1])[keep.reshape(-1)].tolist():
        weights = [math.exp(value - max(z)) for value in z]
        p = sorted((w / sum(weights) for w in weights), reverse=True)
        h.append(-math.fsum(x * math.log(x) for x in p if x > 0) / math.log(len(p)))
        q.append(1 - (p[0] - p[1]))
    return float(np.mean(h)), float(np.mean(q)), len(h)


@given(st.data())
def test_any_shape_precision_and_mask(data: Any) -> None:
    """Every axis, half to double precision, ignored targets, -inf logits, many batches."""
    classes, axes = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 3))
    dim = data.draw(st.integers(-axes - 1, axes))
    kind, near = data.draw(st.sampled_from([
        (torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 1e-6),
        (torch.bfloat16, 1e-6),
    ]))  # fmt: skip
    some = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ignored = data.draw(st.booleans())
    meter = EntropyMeter(classes, dim=dim, ignore_index=-100 if ignored else None)
    seen, kept = [], []
    for batch in range(data.draw(st.integers(1, 20))):
        shape = [1 + (batch + i) % 3 for i in range(axes)]
        logits = (6 * torch.randn(*shape, classes, generator=some)).to(kind)
        logits[..., 1:][torch.rand(*shape, classes - 1, generator=some) < 0.2] = -math.inf
        target = torch.where(torch.rand(shape, generator=some) < 0.3, -100, 1)
        meter.update(logits.movedim(-1, dim).requires_grad_(), target)
        keep = target != -100 if ignored else torch.ones(shape, dtype=torch.bool)
        seen.append(logits.reshape(-1, classes))
        kept.append(keep.reshape(-1))
    logits, keep = torch.cat(seen), torch.cat(kept)
    if not keep.any():
        with pytest.raises(InputError, match="no sample was counted"):
            meter.compute()
        return
    entropy, margin, count = by_hand(logits, keep)
    got = meter.compute()
    assert got == pytest.approx((entropy, margin, count), rel=0, abs=near)
    assert all(type(value) is kind for value, kind in zip(got, (float, float, int), strict=True))


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_ends_of_the_scale(kind: Any) -> None:
    """Uniform is exactly 1, certain exactly 0, also with an impossible class; NaN is refused."""
    meter = EntropyMeter(7)
    meter.update(torch.full((1000, 7), 3.3, dtype=kind))
    assert meter.compute() == (pytest.approx(1, abs=1e-6), 1.0, 1000)
    assert meter.compute().entropy <= 1
    meter.reset()
    meter.update(torch.tensor([[0.0] + [-math.inf] * 6], dtype=kind))
    assert meter.compute() == (0.0, 0.0, 1)
    for wrong in (math.nan, -math.inf):
        meter.update(torch.full((2, 7), wrong, dtype=kind))
        with pytest.raises(InputError, match="compute: logits were NaN"):
            meter.compute()
        meter.reset()


def test_what_a_training_loop_may_do() -> None:
    """Changed logits, inference mode, autocast, empty and large batches."""
    torch.manual_seed(0)
    small, large = torch.randn(3, 5), torch.randn(20_000, 5)
    meter, alone = EntropyMeter(5), EntropyMeter(5)
    changed = small.clone().requires_grad_() * 1
    meter.update(changed)
    changed.detach().zero_()
    meter.update(torch.empty(0, 5))
    with torch.inference_mode():
        meter.update(large * 1)
    with torch.autocast("cpu", torch.bfloat16):
        meter.update(large)
    alone.update(torch.cat([small, large, large]))
    assert meter.compute() == pytest.approx((*alone.compute()[:2], 40_003), abs=1e-7)


Z = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: EntropyMeter(1), "num_classes: 1: .*torch.stack"),
        (lambda: EntropyMeter(4).update(Z), r"logits: expected 4 classes at axis -1, .*\(4, 3\)"),
        (lambda: EntropyMeter(3, ignore_index=0).update(Z), "target: .* got None"),
        (
            lambda: EntropyMeter(3, ignore_index=0).update(Z, torch.zeros(3)),
            r"target: .*\(4,\), cpu, got \(3,\)",
        ),
        (lambda: EntropyMeter(3).compute(), "compute: no sample was counted"),
    ],
)  # fmt: skip
def test_refusals(call: Any, says: str) -> None:
    """A sentence with the field and the value."""
    with pytest.raises(InputError, match=says):
        call()


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs torch says which extra to install; the controller does not need it."""
    for name in ("meter", "sampling"):
        monkeypatch.delitem(sys.modules, f"optsched.elastic.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("meter", "sampling"):
        with pytest.raises(MissingExtra, match=re.escape(".[torch]")):
            importlib.import_module(f"optsched.elastic.{name}")
    importlib.import_module("optsched.elastic").MicroController()
