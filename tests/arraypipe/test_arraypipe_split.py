"""Cutting models: by numbers, names, lists and tracing; ties, skips, merging, refusals."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import arraypipe_traced_models as models
import pytest
import torch
from arraypipe_models import adamw, sgd
from depth import half
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.model import split as cutting
from optsched.arraypipe.model import tied_weights
from optsched.arraypipe.model.split import SplitPoint, counted_costs, split, stage_names
from optsched.arraypipe.model.tracing import traced_stages
from optsched.arraypipe.runtime.stages import fresh_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.runtime.state import JobStage


JOBS = [Job(0, 6, adamw, microbatches=2), Job(1, 5, sgd, recompute=True)]


def points(*names: str) -> list[SplitPoint]:
    """Cuts before these modules."""
    return [SplitPoint(name) for name in names]


def stages_of(model: nn.Module, stages: Any, sample: Any = None) -> list[JobStage]:
    """The stages of a model for a job with AdamW."""
    return fresh_stages(model, stage_names(model, stages, sample), JOBS[0], 0, "a")


def merged(model: nn.Module, parts: Sequence[JobStage]) -> dict[str, Tensor]:
    """The state dict of a model, out of its stages."""
    shards = [tied_weights.shard(model, parts, s)[0] for s in range(len(parts))]
    return {name: value for shard in shards for name, value in shard.items()}


def exact(build_model: Any, stages: Any, data: Any = models.rows, loss: Any = models.loss) -> bool:
    """Whether all jobs have the bits that they have alone."""
    array = ArrayTrainer(build_model, data, jobs=JOBS, stages=stages, loss=loss)
    return array.check_exact(3) == []


functional_gpt = partial(models.Gpt, head="functional")
"""The head is a product with the embedding's weight in the model's own forward."""

TRACED: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (models.Gpt, points("blocks.1", "head"), models.tokens),
    "gpt, head as a product": (functional_gpt, points("blocks.1", "norm"), models.tokens),
    "gpt, four": (models.Gpt, points("blocks.0", "blocks.2", "norm"), models.tokens),
    "residual": (models.Residual, points("conv1", "bn2", "head"), models.images),
    "residual, inside": (models.Residual, points("stem.1", "conv2"), models.images),
    "u-net": (models.UNet, points("down2", "middle", "up2", "up1"), models.images),
    "mixed": (models.Mixed, points("second", "third"), models.pairs),
    "mixed, elsewhere": (models.Mixed, points("first", "lstm", "kinds"), models.pairs),
    "one tensor twice": (models.Same, points("whole", "frozen", "plan"), models.rows),
    "gpt, head read first": (models.ReadsHead, points("blocks.1", "head"), models.tokens),
    "eval mode": (lambda: models.Same(0.5).eval(), points("whole", "frozen"), models.rows),
    "residual, a number": (models.Residual, 3, models.images),
    "gpt, a number": (models.Gpt, 3, models.tokens),
}


@pytest.mark.parametrize("case", half(TRACED))
def test_traced_models_reach_the_same_bits(case: str) -> None:
    """Micro-batches, recompute, dropout, statistics, skips, ties: all as trained alone."""
    build_model, stages, data = TRACED[case]
    assert exact(build_model, stages, data)


OUTPUTS = [models.Output, models.Registered, models.Attributes, models.Row, models.Frozen]


@pytest.mark.parametrize("kind", OUTPUTS, ids=lambda kind: kind.__name__)
def test_outputs_keep_their_type(kind: type) -> None:
    """The loss gets what the model returns, and a module what the forward gives it."""
    kinds = []

    def loss(output: Any, target: Tensor) -> Tensor:
        kinds.append((type(output), type(output.hidden[1])))
        return models.named_loss(output, target)

    assert exact(lambda: models.Named(kind), points("second", "head"), loss=loss)
    assert set(kinds) == {(kind, models.Attributes)}


def test_named_stages_give_the_type_that_the_model_gives() -> None:
    """The loss would get a tensor where the forward of the model makes an object of it."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> models.Output:
            return models.Output(self.b(self.a(x)))

    with pytest.raises(InputError, match="do not give what the forward of Whole gives"):
        ArrayTrainer(Whole, models.rows, jobs=JOBS, stages=[["a"], ["b"]], loss=models.loss)


def chain() -> nn.Sequential:
    """One weight for five layers."""
    layers = [nn.Linear(4, 4) for _ in range(5)]
    for layer in layers:
        layer.weight = layers[0].weight
    acts = [nn.Tanh() for _ in layers]
    return nn.Sequential(*(m for pair in zip(layers, acts, strict=True) for m in pair))


@pytest.mark.parametrize("cuts", [[4, 8], [2, 6], [3, 5]])
def test_weights_used_by_several_layers_of_several_stages(cuts: list[int]) -> None:
    """Gradients of all uses are summed as alone, whether a stage has one use or two."""
    assert exact(chain, cuts)


class Web(nn.Module):
    """Layers that take any earlier values; `steps` has (layer, first value, second value, how)."""

    def __init__(self, steps: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in steps)
        self.head = nn.Linear(4, 3)
        self.steps = list(steps)

    def forward(self, x: Tensor) -> Tensor:
        """Every value is kept for later ones."""
        values = [x]
        for layer, (a, b, how) in zip(self.layers, self.steps, strict=True):
            first, second = values[a % len(values)], values[b % len(values)]
            if how == 0:
                values.append(layer(first).tanh() + second)
            elif how == 1:
                values.append(functional.dropout(layer(first) * second, 0.2, self.training))
            else:
                values.append(layer(torch.cat([first[:, :2], second[:, 2:]], 1)).relu_())
        return self.head(values[-1] + 0.5 * values[len(values) // 2])


@st.composite
def webs(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Steps of a web, and where to cut it."""
    n = draw(st.integers(2, 6))
    step = st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2))
    steps = draw(st.lists(step, min_size=n, max_size=n))
    return steps, sorted(draw(st.sets(st.integers(1, n - 1), min_size=1, max_size=3)))


@given(webs())
def test_any_skips_are_exact(drawn: tuple[list[tuple[int, int, int]], list[int]]) -> None:
    """Values used in any later stages, any number of times, ride along with exact gradients."""
    steps, cuts = drawn
    assert exact(lambda: Web(steps), points(*(f"layers.{cut}" for cut in cuts)))


def test_skips_ride_through_the_stages_between() -> None:
    """What crosses a cut is what later stages use, once each; shapes are read again."""
    stages = traced_stages(models.UNet(), ["down2", "middle", "up2", "up1"], "a")
    crossing = [stage._program.outputs for stage in stages[:-1]]
    a, b, image = "relu_", "relu", "x"
    assert [set(row) & {a, b, image} for row in crossing] == [
        {a, image},  # the image for its size
        {a, b, image},
        {a, image},
        {a},
    ]
    assert [len(row) for row in crossing] == [3, 4, 3, 2]


def test_state_dict_of_the_unsplit_model() -> None:
    """Merged stages have its keys, order and values; shards are a partition; ties are restored."""
    for build_model, stages, data in TRACED.values():
        model, like = build_model(), build_model()
        model.load_state_dict(like.state_dict())
        sample, _ = next(data(JOBS[0], 0))
        parts = split(model, stage_names(build_model(), stages, sample), JOBS[0], "a")
        shards = [tied_weights.shard(model, parts, s)[0] for s in range(len(parts))]
        assert sorted(name for shard in shards for name in shard) == sorted(like.state_dict())
        for name, value in merged(model, parts).items():
            assert torch.equal(value, like.state_dict()[name])
        tied_weights.restore_ties(model, parts)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in like.named_parameters()]
        assert [n for n, _ in model.named_modules()] == [n for n, _ in like.named_modules()]


def test_recurrent_layers_hear_of_the_copy() -> None:
    """An LSTM keeps its weights in a list beside; a borrowed one must be in that too."""
    model = nn.Sequential(nn.LSTM(4, 4), nn.LSTM(4, 4))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    parts = stages_of(model, [1])
    lent = parts[1].borrowed[0].parameter
    assert any(p is lent for p in model[1]._flat_weights)
    tied_weights.restore_ties(model, parts)
    assert any(p is model[0].weight_hh_l0 for p in model[1]._flat_weights)


def test_replaced_tensors_are_replaced_for_stage_and_model() -> None:
    """Stage and model share what the model's own forward reads, also if it is exchanged."""
    model = models.Gpt(head="own")
    stage = traced_stages(model, ["blocks.1", "head"], "a")[0]
    stage._parameters["pos"] = nn.Parameter(torch.zeros(16, 8))
    assert not model.pos.any()
    model._buffers["mask"] = torch.zeros(16, 16, dtype=torch.bool)
    assert not dict(stage.named_buffers())["mask"].any()
    assert set(dict(stage.named_parameters())) < set(dict(model.named_parameters()))
    stage.to(torch.float64)
    assert model.pos.dtype == torch.float64
    assert model.head.weight.dtype == torch.float32  # in another stage


def test_what_the_forward_does_not_use_goes_along() -> None:
    """Unused tensors of a traced model belong to stage 0 and keep their values."""

    class Unused(Web):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[0](x))

    def unused() -> Unused:
        return Unused([(0, 0, 0)] * 2)

    assert exact(unused, points("head"))
    model = unused()
    parts = stages_of(model, points("head"))
    assert "layers.1.weight" in dict(parts[0].parameters)
    assert merged(model, parts).keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_a_list_of_stages(kind: Any) -> None:
    """A list is an `nn.Sequential` of its modules; as many stages as modules are the modules."""

    def build_model() -> Any:
        return kind([nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Dropout(0.2), nn.Linear(8, 3)])

    assert exact(build_model, 3)
    model = cutting.build(build_model, JOBS[0])
    assert stage_names(model, 3, torch.ones(1, 4)) == (("0",), ("1",), ("2",))
    assert list(model.state_dict())[:2] == ["0.0.weight", "0.0.bias"]
    for wrong in (kind([]), [nn.Linear(1, 1), 3]):
        with pytest.raises(InputError, match="expected a list of"):
            cutting.build(lambda wrong=wrong: wrong, JOBS[0])


def test_counted_costs() -> None:
    """Two operations a multiply-add plus the size of the output, whoever calls the layers."""
    x = torch.randn(5, 4)
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 3), act)
    linear = [2 * 5 * 4 * 8 + 40, 40, 2 * 5 * 8 * 3 + 15, 15]
    assert counted_costs(model, list(model), x) == linear
    own = Web([(0, 0, 0)] * 2)
    costs = counted_costs(own, [*own.layers, own.head], x)
    assert costs == [2 * 5 * 4 * 4 + 20] * 2 + [2 * 5 * 4 * 3 + 15]
    assert stage_names(own, 3, x) == (("",), ("layers.1",), ("head",)) == stage_names(own, 3, x)
    assert stage_names(own, 1, x) == (("",),)


def test_another_mode_of_a_traced_model_is_refused() -> None:
    """What its own forward does by its mode is fixed by the trace; modules go by theirs."""
    model = models.Gpt()
    stage = traced_stages(model, ["blocks.1"], "a")[0]
    tokens = torch.randint(0, 11, (2, 5))
    model.embed.eval()
    stage(tokens)
    model.eval()
    with pytest.raises(InputError, match="changed its mode"):
        stage(tokens)


class Notes(nn.Linear):
    """Has something in a state dict that is no tensor."""

    def get_extra_state(self) -> str:
        """Its size."""
        return f"{self.in_features}"

    def set_extra_state(self, state: str) -> None:
        """Nothing."""


@pytest.mark.parametrize("stages", [[1, 2], points("1", "2")], ids=["cuts", "points"])
def test_extra_states_are_those_of_their_stages(stages: Any) -> None:
    """A stage brings what its own modules have, also deep in them."""
    model = nn.Sequential(nn.Linear(4, 5), Notes(5, 6), nn.Sequential(Notes(6, 3)))
    parts = stages_of(model, stages)
    found = [
        [
            value
            for value in tied_weights.shard(model, parts, s)[0].values()
            if isinstance(value, str)
        ]
        for s in range(3)
    ]
    assert found == [[], ["5"], ["6"]]


# what cannot be cut


def cut(model: nn.Module, stages: Any, sample: Any = None) -> Any:
    """Split a model."""
    return split(model, stage_names(model, stages, sample), JOBS[0], "a")


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
