"""Jobs of dictionaries and output objects: token-weighted losses of a causal language model."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import training_cases as cases
from torch import nn
from training_cases import Replay, job

from optsched import InputError
from optsched.elastic import run
from optsched.elastic.objective import Objective, batch_on

if TYPE_CHECKING:
    from pathlib import Path


def test_equals_one_process(tmp_path: Path) -> None:
    """Gradients are weighted by valid targets: the result of the whole batch, to 1e-6.

    The model computes its loss in single precision.
    """
    quotas = [1, 2, 2]
    fields = cases.LANGUAGE | {"model": partial(cases.gpt2, 0.0), "optimizer": cases.sgd}
    one = job("a", **fields, sizes=(1, 2), passes=3)
    found = run([one], 2, Replay({"a": quotas}), folder=tmp_path)
    assert not found.failed
    assert found.quotas == {"a": quotas}
    model, _, losses = cases.alone(one, quotas)
    (state,) = cases.states(tmp_path, "a")
    for key, value in model.state_dict().items():
        assert torch.allclose(state["model"][key], value, rtol=0, atol=1e-6), key
    log = found.records["a"]
    assert [record["loss"] for record in log] == pytest.approx(losses, rel=1e-6)
    assert log[-1]["loss"] < log[0]["loss"] < 1.1 * math.log(cases.VOCABULARY)
    assert all(0 < u <= 1 for record in log for u in record["entropy"])
    held = cases.padded([*one.data()[1]])
    right = model.eval()(**held).logits[:, :-1].argmax(-1) == held["labels"][:, 1:]
    share = int(right.sum()) / int((held["labels"][:, 1:] >= 0).sum())
    assert log[-1]["metric"] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("loss", [None, cases.token_loss])
def test_total_and_predictions(loss: Any) -> None:
    """The sum over valid targets and the logits before each; without targets 0, and no NaN."""
    one = job("a", **cases.LANGUAGE | {"model": partial(cases.gpt2, 0.0)}, loss=loss)
    cpu, model, objective = torch.device("cpu"), one.model(), Objective(one)
    batch = batch_on(cpu, cases.padded([one.data()[0][i] for i in range(3)]), 3)
    out = batch.inputs.call(model)
    total, count = objective.total(batch, out)
    logits, labels, axis = objective.predictions(batch, out)
    assert (axis, objective.shifted) == (-1, True)
    assert int(count) == int((labels != -100).sum()) == int((batch.labels[:, 1:] >= 0).sum())
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for samples, given in ((0, batch.labels), (3, torch.full_like(batch.labels, -100))):
        none = batch_on(cpu, batch.target | {"labels": given}, samples)
        total, count = objective.total(none, none.inputs.call(model))
        total.backward()
        assert float(total.detach()) == float(count) == 0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


class Heads(nn.Module):
    """A model with some output object."""

    def __init__(self, loss: Any, logits: str = "logits") -> None:
        super().__init__()
        self.layer, self.loss, self.logits = nn.Embedding(9, 5), loss, logits

    def forward(self, input_ids: Any, labels: Any) -> Any:
        """Logits of every position, and a loss of them."""
        z = self.layer(input_ids)
        return {"loss": self.loss(z, labels), self.logits: z}


def plain(z: Any, labels: Any) -> Any:
    """Mean cross entropy at the same positions."""
    return nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("model", "labels", "says"),
    [
        (Heads(plain), (2, 4), ""),
        (Heads(lambda z, y: 2 * plain(z, y)), (2, 4), "loss: that of the model, .* give the job"),
        (Heads(lambda z, y: None), (2, 4), "loss: the output of the model has none"),
        (Heads(plain, "scores"), (2, 4), "expected a tensor or an output with `logits`"),
        (Heads(lambda z, y: z.sum()), (2, 3), r"labels: expected \(2, 4\) classes, got \(2, 3\)"),
    ],
)
def test_output_objects(model: Any, labels: Any, says: str) -> None:
    """What is no mean cross entropy of logits and labels is refused, with the way out."""
    some = torch.Generator().manual_seed(0)
    given = {
        "input_ids": torch.randint(9, (2, 4), generator=some),
        "labels": torch.randint(5, labels, generator=some),
    }
    objective = Objective(job("a"))
    batch = batch_on(torch.device("cpu"), given, 2)
    out = batch.inputs.call(model)
    if says:
        with pytest.raises(InputError, match=says):
            objective.total(batch, out)
        return
    total, count = objective.total(batch, out)
    assert (objective.shifted, int(count)) == (False, 8)
    assert float(total.detach()) == pytest.approx(8 * float(out["loss"].detach()))
    assert int(objective.score(batch, out)[1]) == 8
