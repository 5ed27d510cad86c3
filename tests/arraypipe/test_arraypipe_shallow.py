"""Models with one block per stage, which ranks are checked with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arraypipe_models import sgd, trainer
from torch import Tensor, nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe import trainer as trainer_module
from optsched.arraypipe.model import calls
from optsched.arraypipe.shallow import shallow


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


def test_one_block_per_stage() -> None:
    """The first of every stage, with the weights that it has in the whole model; it is exact."""
    data = [(torch.randn(4), k % 3) for k in range(32)]
    array = ArrayTrainer(Blocks, data, [2, 5], nn.functional.cross_entropy)
    whole = array.with_jobs([Job(0, 8, sgd), Job(1, 8, sgd, microbatches=2)])
    small = shallow(whole)
    assert small is not None
    made = small.with_jobs(whole.jobs)
    assert made.cuts == ("blocks.1", "blocks.2")
    torch.manual_seed(0)
    expected: Any = Blocks()
    torch.manual_seed(0)
    got: Any = made.build_model()
    assert len(got.blocks) == 3
    for k, block in enumerate((0, 2, 5)):
        assert torch.equal(got.blocks[k].weight, expected.blocks[block].weight)
    assert torch.equal(got.last.weight, expected.last.weight)
    assert made.check_exact(2) == []


def test_other_cuts_have_no_small_model() -> None:
    """An `nn.Sequential` has no list of blocks."""
    assert shallow(trainer([Job(0, 8, sgd)])) is None


class Skips(Blocks):
    """The last layer gets what the first one has returned, too."""

    def forward(self, x: Tensor) -> Tensor:
        """A value crosses all cuts."""
        y: Tensor = self.last(self.first(x)) + super().forward(x)
        return y


@pytest.mark.parametrize("init", [False, True])
def test_a_model_that_does_not_fit_is_compared_by_few_blocks(
    init: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And balanced without values of its parameters."""
    data = [(torch.randn(4), k % 3) for k in range(32)]
    compared = []
    honest = trainer_module.check_cut

    def noted(model: nn.Module, *given: Any) -> None:
        compared.append(len(model.blocks))  # type: ignore[arg-type]
        honest(model, *given)

    monkeypatch.setattr(trainer_module, "check_cut", noted)
    monkeypatch.setattr(trainer_module, "fits", lambda model: False)
    monkeypatch.setattr(calls, "LARGE", 0)
    torch.save(Blocks().state_dict(), tmp_path / "weights.pt")
    job = Job(0, 8, sgd, init=tmp_path / "weights.pt" if init else None)
    array = ArrayTrainer(Blocks, data, 3, nn.functional.cross_entropy).with_jobs([job])
    assert (array.cuts, compared) == (("blocks.2", "blocks.4"), [3])
    assert array.check_exact(2) == []
    with pytest.raises(InputError, match="has the loss nan"):
        ArrayTrainer(Skips, data, 3, nn.functional.cross_entropy).with_jobs([Job(0, 8, sgd)])
