"""Cutting models at the calls of their blocks: what is exact, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import own_models
import pytest
import torch
from arraypipe_models import adamw, sgd
from hypothesis import given, settings
from hypothesis import strategies as st
from own_models import WIDTH, Kind, Model, rows, tokens
from runs import array_trainer
from torch import Tensor, nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe import trainer as trainer_module
from optsched.arraypipe.shallow import shallow

if TYPE_CHECKING:
    from collections.abc import Callable


FLAGS = [name for name, kind in Kind.__annotations__.items() if kind == "bool"]


def array(build: Callable[..., Any], stages: Any, data: Any = rows, **options: Any) -> ArrayTrainer:
    """Two jobs, one of which recomputes."""
    jobs = [
        Job(1, 6, adamw, microbatches=2, **options),
        Job(2, 5, sgd, recompute=True, **options),
    ]
    return array_trainer(build, data, jobs=jobs, stages=stages, loss=own_models.loss)


KINDS = {
    "depth": st.integers(2, 4),
    "flags": st.sets(st.sampled_from(FLAGS)),
    "output": st.sampled_from(["tensor", "tuple", "dict"]),
    "stages": st.integers(2, 4),
}


@settings(max_examples=settings().max_examples // 4)
@given(**KINDS)
def test_models_of_every_kind(depth: int, flags: set[str], output: str, stages: int) -> None:
    """No bit differs, whatever a model has beside its blocks and however it calls them."""
    kind = replace(Kind(depth, output=output), **dict.fromkeys(flags, True))
    assert array(partial(Model, kind), min(stages, depth), tokens).check_exact(2) == []


class Own(nn.Module):
    """Three layers, by a function that calls them."""

    def __init__(self, call: Callable[[Any, Tensor], Any], **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, 3)
        for name, make in parts.items():
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Any:
        """What the function returns."""
        return self.call(self, x)


def own(call: Callable[[Any, Tensor], Any], **parts: Callable[[], Any]) -> Callable[[], Own]:
    """A function that makes such a model."""
    return lambda: Own(call, **parts)


def chain(m: Any, x: Tensor) -> Any:
    """One after the other."""
    return m.c(torch.tanh(m.b(torch.tanh(m.a(x)))))


def recurrent(m: Any, x: Tensor) -> Any:
    """A block that keeps a list of its weights."""
    return m.c(m.lstm(m.a(x).unsqueeze(1))[0][:, 0])


def listed(m: Any, x: Tensor) -> Any:
    """Blocks that are called by number, the last by a name of its own."""
    for layer in m.layers[:-1]:
        x = layer(x).relu()
    return m.c(m.layers[-1](x))


def sequence(*made: nn.Module) -> nn.Sequential:
    """Of the same width, with a head."""
    return nn.Sequential(*made, nn.Linear(WIDTH, 3))


def linear() -> nn.Module:
    """One layer."""
    return nn.Linear(WIDTH, WIDTH)


def hooked() -> nn.Module:
    """Hooks on the whole model: each runs where the forward begins and where it ends."""
    model = Own(chain)
    model.register_forward_pre_hook(lambda m, given: (given[0] * 2,))
    model.register_forward_hook(lambda m, given, output: output * 3)
    return model


def with_layers() -> nn.Module:
    """A list of blocks."""
    return Own(listed, layers=lambda: nn.ModuleList(linear() for _ in range(4)))


def same_twice() -> nn.Module:
    """A layer without tensors at two places."""
    relu = nn.ReLU(inplace=True)
    return sequence(linear(), relu, linear(), relu)


EXACT: dict[str, tuple[Callable[[], Any], Any, tuple[str, ...]]] = {
    "children": (own(chain), 2, ("b",)),
    "children by name": (own(chain), ["b", "c"], ("b", "c")),
    "one stage": (own(chain), 1, ()),
    "recurrent": (
        own(recurrent, lstm=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)), ["lstm"], ("lstm",),
    ),
    "list": (with_layers, 3, ("layers.1", "layers.3")),
    "list by name": (with_layers, ["layers.2"], ("layers.2",)),
    "hooks": (hooked, ["b", "c"], ("b", "c")),
    "a list of modules": (lambda: [linear(), nn.Tanh(), nn.Linear(WIDTH, 3)], [1], ("1",)),
    "a sequence in a sequence": (
        lambda: sequence(linear(), nn.Sequential(linear(), linear())), ["1.1"], ("1.1",),
    ),
    "the same layer twice": (same_twice, [2], ("2",)),
    "a wrapper": (
        own(lambda m, x: m.net(x), net=lambda: sequence(linear(), linear())), ["net.1"],
        ("net.1",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    """All forms of `stages`; names of parameters are those of the whole model."""
    build, stages, cuts = EXACT[name]
    made = array(build, stages)
    assert made.cuts == cuts
    assert made.check_exact(2) == []
    trained = made.train_alone(0, 1)
    model = build()
    known = (nn.Sequential(*model) if isinstance(model, list) else model).state_dict()
    assert {*trained.parameters, *trained.buffers} == {*known}


class Counted(nn.Module):
    """Changes a buffer of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        self.steps.add_(1)
        found: Tensor = self.b(self.a(x))
        return found


def skip(m: Any, x: Tensor) -> Any:
    """The last layer gets more than its input."""
    y = m.a(x)
    return m.c(m.b(y) + y)


def reads(m: Any, x: Tensor) -> Any:
    """A weight of another stage, without a call."""
    return m.c(m.b(m.a(x)) @ m.a.weight)


def twice(m: Any, x: Tensor) -> Any:
    """A layer of two stages."""
    return m.c(m.a(m.b(m.a(x))))


def backward_hook() -> nn.Module:
    """On the whole model."""
    model = Own(chain)
    model.register_full_backward_hook(lambda m, a, b: None)
    return model


def random_skip(m: Any, x: Tensor) -> Any:
    """Random numbers of the first stage are made again in the last one."""
    noise = torch.randn(len(x), 1)
    return m.c(m.b(m.a(x) * noise)) * noise


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "skip": (own(skip), ["b"], "has the loss nan instead of"),
    "a weight": (own(reads), ["b"], "has the loss nan instead of"),
    "random": (own(random_skip), ["b"], "a value crosses a cut beside"),
    "twice": (own(twice), ["b"], r"module 'a' of job job0 occurs twice, in stages 0 and 1"),
    "cut twice": (own(twice), ["a"], "'a' is called more than once by the forward of Own"),
    "never": (own(lambda m, x: m.c(m.a(x))), ["b"], "'b' is not called by the forward of Own"),
    "backward hook": (backward_hook, ["b"], "the model itself.* has backward hooks"),
    "buffers": (Counted, ["b"], "changes its buffers in job job0"),
    "first": (own(chain), ["a"], "nothing is called before 'a'"),
    "order": (own(chain), ["c", "b"], r"does not call \['c', 'b'\] in this order"),
    "inside": (
        own(lambda m, x: m.c(m.n(m.a(x))), n=lambda: nn.Sequential(linear(), linear())),
        ["n", "n.1"], "'n' contains a module at which another stage begins",
    ),
    "no module": (own(chain), ["d"], "the model has no module 'd'$"),
    "part of a name": (
        own(lambda m, x: m.b(m.n(m.a(x))), n=lambda: nn.Sequential(linear())), ["0"],
        "no module '0'; did you mean 'n.0'",
    ),
    "too many": (own(chain), 5, r"expected 1\.\.3, the blocks of Own"),
    **{f"{stages} of a list": (
        own(lambda m, x: m.c(m.n[2](m.n[1](m.n[0](m.a(x))))),
            n=lambda: nn.ModuleList(linear() for _ in range(3))),
        stages, rf"expected 1\.\.3, the blocks of Own.*, got {stages};",
    ) for stages in (0, 9)},
    "beyond": (own(chain), [3], r"ascending cut indices in 1\.\.2"),
    "raises": (own(lambda m, x: m.b(m.a(x)).view(7, 5)), ["b"], "raises on the first batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Before anything is trained, with the module and a reason."""
    build, stages, sentence = REFUSED[name]
    with pytest.raises(InputError, match=sentence):
        array(build, stages)


def test_a_model_of_another_job_is_compared_too() -> None:
    """Arguments of a job may change what its forward does."""

    def call(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = m.b(y)
        return m.c(z + y if m.more else z)

    jobs = [Job(0, 4, sgd), Job(1, 4, sgd, model={"more": True})]
    with pytest.raises(InputError, match=r"Own.* has the loss nan"):
        array_trainer(
            lambda more=False: Own(call, more=lambda: more), rows, jobs=jobs, stages=["b"],
            loss=own_models.loss,
        )  # fmt: skip


def test_a_block_that_is_called_twice_later() -> None:
    """Not on the first batch: with the sentence, when it happens."""

    def call(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = m.b(y)
        return m.c(m.b(y) if len(x) == 5 else z)

    jobs = [Job(0, 4, sgd), Job(1, 5, sgd)]
    array = array_trainer(own(call), rows, jobs=jobs, stages=["b"], loss=own_models.loss)
    with pytest.raises(InputError, match="'b', at which a stage begins, is called more than once"):
        array.check_exact(1)


# parts


# models with few blocks per stage, which ranks are checked with


class Blocks(nn.Module):
    """Six blocks in a list between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        y: Tensor = self.last(x)
        return y


def layers() -> nn.Sequential:
    """Widths 4, 8, 8, 8, 8, 6, 6, 6, 3."""
    rows = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(3))]
    return nn.Sequential(*rows, nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def of_rows(build: Callable[[], nn.Module], stages: Any, *jobs: Job) -> ArrayTrainer:
    """Of random rows."""
    data = [(torch.randn(4), k % 3) for k in range(32)]
    return ArrayTrainer(build, data, stages, nn.functional.cross_entropy).with_jobs(jobs)


KEPT: dict[str, tuple[Callable[[], Any], Any, dict[str, str]]] = {
    "list": (
        Blocks, [2, 5], {"blocks.0": "blocks.0", "blocks.1": "blocks.2", "blocks.2": "blocks.5"},
    ),
    "last block": (Blocks, [3], {f"blocks.{k}": f"blocks.{n}" for k, n in enumerate((0, 3, 5))}),
    "chain": (layers, [2], {name: name for name in "02467"}),
    "in a module": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Sequential(*layers()[1:4]), nn.Linear(8, 3)),
        ["1.1"], {"1.0": "1.0", "1.1": "1.1", "1.2": "1.2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_blocks_that_are_kept(name: str) -> None:
    """The first of every stage and what shapes need, with the weights of the whole model."""
    build, stages, kept = KEPT[name]
    whole = of_rows(build, stages, Job(0, 8, sgd), Job(1, 8, sgd, microbatches=2))
    small = shallow(whole)
    if name == "in a module":  # no block can be left out
        assert small is None
        return
    assert small is not None
    made = small.with_jobs(whole.jobs)
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    got: Any = made.build_model()
    for new, known in kept.items():
        one, other = got.get_submodule(new), expected.get_submodule(known)
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert len(list(got.parameters())) == len(
        {id(p) for k in kept.values() for p in expected.get_submodule(k).parameters()}
    ) + 4 * (build is Blocks)
    assert made.n_stages == whole.n_stages
    assert made.check_exact(2) == []
    assert shallow(made) is None


class Skips(Blocks):
    """The last layer gets what the first one has returned, too."""

    def forward(self, x: Tensor) -> Tensor:
        """A value crosses all cuts."""
        y: Tensor = self.last(self.first(x)) + super().forward(x)
        return y


def test_a_model_that_does_not_fit_is_compared_by_few_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Also with weights of a file, which has other names; what does not fit is refused."""
    compared = []
    honest = trainer_module.check_cut

    def noted(model: nn.Module, *given: Any) -> None:
        compared.append(len(model.blocks))  # type: ignore[arg-type]
        honest(model, *given)

    monkeypatch.setattr(trainer_module, "check_cut", noted)
    monkeypatch.setattr(trainer_module, "fits", lambda model: False)
    torch.save(Blocks().state_dict(), tmp_path / "weights.pt")
    made = of_rows(Blocks, 3, Job(0, 8, sgd, init=tmp_path / "weights.pt"))
    assert (made.cuts, compared) == (("blocks.2", "blocks.4"), [4])
    assert made.check_exact(2) == []
    with pytest.raises(InputError, match="has the loss nan"):
        of_rows(Skips, 3, Job(0, 8, sgd))
