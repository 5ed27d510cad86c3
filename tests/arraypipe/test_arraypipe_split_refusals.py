"""What cannot be cut is refused with a sentence, and the model is as it was."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job  # noqa: E402
from optsched.arraypipe.model.split import SplitPoint, split, stage_names  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch


def points(*names: str) -> list[SplitPoint]:
    """Cuts before these modules."""
    return [SplitPoint(name) for name in names]


def cut(model: nn.Module, stages: Any, sample: Any = None) -> Any:
    """Split a model."""
    return split(model, stage_names(model, stages, sample), Job(0, 6, adamw), "a")


class Base(nn.Module):
    """Three layers, a buffer, an activation, and two in a row that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.count = nn.ReLU(), 0
        self.pair = nn.Sequential(nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.register_buffer("buf", torch.ones(4))


def _plain(m: Any, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x) * m.buf))


def _flow(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    if x.sum() > 0:
        x = x * 2
    return m.c(m.b(x))


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.a(x)
    return m.c(m.b(x))


def _late(m: Any, x: Tensor) -> Tensor:
    x = m.b(m.a(x) + m.buf)
    m.buf.add_(1)
    return m.c(x)


def _tuples(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    halves = x.chunk(2, 1)
    return m.c(m.b(x)) + halves[0].sum()


def _views(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    y = x.view(-1, 4)
    z = m.b(x)
    y.mul_(2)
    return m.c(z) + x


Forward: TypeAlias = "Callable[..., Tensor]"
# what a model of layers a, b, c does, how it is cut, and what is said about it
REFUSED: dict[str, tuple[Forward, Any, str]] = {
    "control flow": (_flow, points("b"), r"cannot be traced: .*control flow \(.*test_array.*\d+\)"),
    "no_grad": (_no_grad, points("b"), "calls 'a' under no_grad"),
    "attribute": (
        lambda m, x: setattr(m, "count", m.count + 1) or _plain(m, x), points("b"),
        "assigns to 'count'",
    ),
    "buffer": (
        lambda m, x: setattr(m, "buf", m.buf + 1) or _plain(m, x), points("b"),
        "assigns to 'buf'|cannot be traced",
    ),
    "random": (
        lambda m, x: m.c(m.b(m.a(x)) if random.random() < 2 else m.a(x)), points("c"),
        "draws random numbers",
    ),
    "type": (
        lambda m, x: m.c(m.b(m.a(x)) * (2 if isinstance(x, Tensor) else 1)), points("c"),
        "gives other values than by itself",
    ),
    "arguments": (
        lambda m, x, y: m.c(m.b(m.a(x) + y)), points("c"), "missing 1 required positional argument"
    ),
    "order": (_plain, points("c", "b"), "calls 'b' before 'c'"),
    "twice": (lambda m, x: m.c(m.b(m.b(m.a(x)))), points("b"), "calls 'b' twice"),
    "twice, two stages": (
        lambda m, x: m.c(m.b(m.act(m.b(m.a(x))))), points("act", "c"),
        "'b' of job .* occurs twice, in stages 0",
    ),
    "not called": (_plain, points("act"), "does not call 'act'"),
    "nothing before": (_plain, points("a"), "leaves stage 0 with nothing to do"),
    "no module": (_plain, points("d"), "no module 'd'"),
    "no name": (_plain, points(""), r"name of a module in SplitPoint\(''\)"),
    "mixed": (_plain, [SplitPoint("b"), "c"], r"stages\[1\]: expected a SplitPoint"),
    "late change": (_late, points("b", "c"), "'buf' of job .* changed in stage 1 and read in"),
    "number": (
        lambda m, x: m.a(x).sum().item() * m.c(m.b(x)), points("b", "c"),
        "'item', a float, crosses the cut after stage 0",
    ),
    "tuple": (_tuples, points("b", "c"), "'chunk', a tuple, crosses the cut after stage 0"),
    "views": (_views, points("b"), "a view changed in place"),
    "too many": (_plain, 4, "calls 3 modules once each, too few for 4 stages"),
    "cannot be counted": (_flow, 2, "the forward of Model .* cannot be traced"),
    "indices": (_plain, [1], "no nn.Sequential; name the modules .*SplitPoint"),
    "whole": (_plain, [[""], ["c"]], "'' is the whole model"),
    "not named": (_plain, [["a"], ["b"]], "c.weight of job a belongs to no stage"),
    "nested": (_plain, [["pair"], ["pair.1"]], "'pair.1' .* occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str) -> None:
    """What cannot be cut says why, and the model is as before."""
    forward, stages, sentence = REFUSED[case]
    model = type("Model", (Base,), {"forward": forward})()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [sorted(module.__dict__) for module in model.modules()]
    with pytest.raises(InputError, match=sentence):
        cut(model, stages, torch.randn(5, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    assert model.count == 0


def test_tensors_that_two_stages_hold() -> None:
    """A buffer or a module with tensors at two stages is refused, one without tensors is not."""
    a, b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    b._buffers["running_mean"] = a._buffers["running_mean"]
    with pytest.raises(InputError, match=r"buffer '0.running_mean' of job a is used by stages 0"):
        cut(nn.Sequential(a, b), [1])
    layer, act = nn.Linear(4, 4), nn.ReLU()
    with pytest.raises(InputError, match="'0' of job a occurs twice"):
        cut(nn.Sequential(layer, act, nn.Linear(4, 4), layer), [2])
    with pytest.raises(InputError, match="'2' occurs twice"):  # its call would set two keys
        cut(nn.Sequential(layer, act, act), [2])
    assert len(cut(nn.Sequential(layer, act, nn.Linear(4, 4), act), [2])) == 2
