"""Models with few blocks per stage, which ranks are checked with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import sgd
from torch import Tensor, nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe import trainer as trainer_module
from optsched.arraypipe.shallow import shallow

if TYPE_CHECKING:
    from collections.abc import Callable


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


def chain() -> nn.Sequential:
    """Widths 4, 8, 8, 8, 8, 6, 6, 6, 3."""
    rows = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(3))]
    return nn.Sequential(*rows, nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def array(build: Callable[[], nn.Module], stages: Any, *jobs: Job) -> ArrayTrainer:
    """Of random rows."""
    data = [(torch.randn(4), k % 3) for k in range(32)]
    return ArrayTrainer(build, data, stages, nn.functional.cross_entropy).with_jobs(jobs)


KEPT: dict[str, tuple[Callable[[], Any], Any, dict[str, str]]] = {
    "list": (
        Blocks, [2, 5], {"blocks.0": "blocks.0", "blocks.1": "blocks.2", "blocks.2": "blocks.5"},
    ),
    "last block": (Blocks, [3], {f"blocks.{k}": f"blocks.{n}" for k, n in enumerate((0, 3, 5))}),
    "chain": (chain, [2], {name: name for name in "02467"}),
    "in a module": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Sequential(*chain()[1:4]), nn.Linear(8, 3)),
        ["1.1"], {"1.0": "1.0", "1.1": "1.1", "1.2": "1.2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_blocks_that_are_kept(name: str) -> None:
    """The first of every stage and what shapes need, with the weights of the whole model."""
    build, stages, kept = KEPT[name]
    whole = array(build, stages, Job(0, 8, sgd), Job(1, 8, sgd, microbatches=2))
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
    made = array(Blocks, 3, Job(0, 8, sgd, init=tmp_path / "weights.pt"))
    assert (made.cuts, compared) == (("blocks.2", "blocks.4"), [4])
    assert made.check_exact(2) == []
    with pytest.raises(InputError, match="has the loss nan"):
        array(Skips, 3, Job(0, 8, sgd))
