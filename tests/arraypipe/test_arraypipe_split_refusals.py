"""What cannot be cut is refused with a sentence, and the model is as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import arraypipe_traced_models as models  # noqa: E402
from arraypipe_models import adamw  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job  # noqa: E402
from optsched.arraypipe.model.split import SplitPoint, split, stage_names  # noqa: E402

pytestmark = pytest.mark.torch


def points(*names: str) -> list[SplitPoint]:
    """Cuts before these modules."""
    return [SplitPoint(name) for name in names]


def cut(model: nn.Module, stages: Any, sample: Any = None) -> Any:
    """Split a model."""
    return split(model, stage_names(model, stages, sample), Job(0, 6, adamw), "a")


class Base(nn.Module):
    """Three layers, a buffer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.count = nn.ReLU(), 0
        self.register_buffer("buf", torch.ones(4))


class Flow(Base):
    """Decides by a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        if x.sum() > 0:
            x = x * 2
        return self.c(self.b(x))


class NoGrad(Base):
    """Runs a part without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        with torch.no_grad():
            x = self.a(x)
        return self.c(self.b(x))


class Counts(Base):
    """Counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        self.count += 1
        return self.c(self.b(self.a(x)))


class Assigns(Base):
    """Replaces a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        self.buf = self.buf + 1
        return self.c(self.b(self.a(x)))


class LayerDrop(Base):
    """Leaves out a layer by chance."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        x = self.b(x) if random.random() < 2 else x
        return self.c(x)


class Looks(Base):
    """Asks for a type."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        return self.c(self.b(x * 2 if isinstance(x, Tensor) else x))


class TwoArguments(Base):
    """Wants more than one argument."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward."""
        return self.c(self.b(self.a(x) + y))


class Plain(Base):
    """a, b, c."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        return self.c(self.b(self.a(x) * self.buf))


class Twice(Base):
    """Calls a layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        return self.c(self.b(self.act(self.b(self.a(x)))))


class Late(Base):
    """Changes a buffer that an earlier stage has read."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.b(self.a(x) + self.buf)
        self.buf.add_(1)
        return self.c(x)


class Number(Base):
    """Needs a number that comes from values."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        n = x.sum().item()
        return self.c(self.b(x)) * n


class Tuples(Base):
    """Takes a tuple apart after the cut."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        halves = x.chunk(2, 1)
        return self.c(self.b(x)) + halves[0].sum()


class Views(Base):
    """Two views of one tensor cross, and one is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward."""
        x = self.a(x)
        y = x.view(-1, 4)
        z = self.b(x)
        y.mul_(2)
        return self.c(z) + x


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "control flow": (Flow, points("b"), r"cannot be traced: .*control flow \(.*test_array.*\d+\)"),
    "no_grad": (NoGrad, points("b"), "calls 'a' under no_grad"),
    "attribute": (Counts, points("b"), "assigns to 'count'"),
    "buffer": (Assigns, points("b"), "assigns to 'buf'|cannot be traced"),
    "random": (LayerDrop, points("c"), "draws random numbers"),
    "type": (Looks, points("c"), "gives other values than by itself"),
    "arguments": (TwoArguments, points("c"), "missing 1 required positional argument"),
    "order": (Plain, points("c", "b"), "calls 'b' before 'c'"),
    "twice": (Twice, points("b"), "calls 'b' twice"),
    "twice, two stages": (Twice, points("act", "c"), "'b' of job .* occurs twice, in stages 0"),
    "not called": (Plain, points("act"), "does not call 'act'"),
    "nothing before": (Plain, points("a"), "leaves stage 0 with nothing to do"),
    "no module": (Plain, points("d"), "no module 'd'"),
    "no name": (Plain, points(""), r"name of a module in SplitPoint\(''\)"),
    "mixed": (Plain, [SplitPoint("b"), "c"], r"stages\[1\]: expected a SplitPoint"),
    "late change": (Late, points("b", "c"), "'buf' of job .* changed in stage 1 and read in"),
    "number": (Number, points("b", "c"), "'item', a float, crosses the cut after stage 0"),
    "tuple": (Tuples, points("b", "c"), "'chunk', a tuple, crosses the cut after stage 0"),
    "views": (Views, points("b"), "a view changed in place"),
    "too many": (Plain, 4, "calls 3 modules once each, too few for 4 stages"),
    "cannot be counted": (Flow, 2, "the forward of Flow .* cannot be traced"),
    "indices": (Plain, [1], "no nn.Sequential; name the modules .*SplitPoint"),
    "whole": (Plain, [[""], ["c"]], "'' is the whole model"),
    "not named": (Plain, [["a"], ["b"]], "c.weight of job a belongs to no stage"),
    "nested": (models.Residual, [["stem"], ["stem.1"]], "'stem.1' .* occurs twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str) -> None:
    """What cannot be cut says why, and the model is as before."""
    build_model, stages, sentence = REFUSED[case]
    model = build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [sorted(module.__dict__) for module in model.modules()]
    sample = torch.randn(5, 2, 8, 8) if build_model is models.Residual else torch.randn(5, 4)
    with pytest.raises(InputError, match=sentence):
        cut(model, stages, sample)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    assert getattr(model, "count", 0) == 0


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
