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
from optsched.elastic import StepPlan, VariableBatchLoader, read_checkpoint, run
from optsched.elastic.checkpoint import seed_all
from optsched.elastic.objective import Objective, batch_on

if TYPE_CHECKING:
    from pathlib import Path


def alone(one: Any, quotas: list[int]) -> tuple[Any, list[float]]:
    """The oracle: one process, the model's mean loss of every global batch, padded as a whole."""
    seed_all(one.seed, 0, 0)
    model, (train, _) = one.model(), one.data()
    optimizer = one.optimizer(model.parameters())
    losses = []
    for number, workers in enumerate(quotas):
        counts = [len(train) // workers + (r < len(train) % workers) for r in range(workers)]
        sizes = [one.batch_size // workers + (r < one.batch_size % workers) for r in range(workers)]
        plan = StepPlan(tuple(counts), tuple(sizes))
        loader = VariableBatchLoader(train, plan, 0, epoch=number, seed=one.seed)
        total, targets = 0.0, 0
        model.train()
        parts = [loader._parts(r) for r in range(workers)]
        for step in zip(*parts, strict=True):
            batch = cases.padded([train[i] for part in step for i in part])
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            valid = int((batch["labels"][:, 1:] >= 0).sum())
            total, targets = total + float(loss.detach()) * valid, targets + valid
        losses.append(total / targets)
    return model, losses


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
    model, losses = alone(one, quotas)
    state = read_checkpoint(tmp_path / "a" / "checkpoint.pt", "a")["model"]
    for key, value in model.state_dict().items():
        assert torch.allclose(state[key], value, rtol=0, atol=1e-6), key
    log = found.records["a"]
    assert [record["loss"] for record in log] == pytest.approx(losses, rel=1e-6)
    assert log[-1]["loss"] < log[0]["loss"] < 1.1 * math.log(cases.VOCABULARY)
    assert all(0 < u <= 1 for record in log for u in record["entropy"])
    held = cases.padded([*one.data()[1]])
    right = model.eval()(**held).logits[:, :-1].argmax(-1) == held["labels"][:, 1:]
    share = int(right.sum()) / int((held["labels"][:, 1:] >= 0).sum())
    assert log[-1]["metric"] == pytest.approx(share, abs=0.03)


def made(kind: str) -> tuple[Any, Any, Any]:
    """An objective, a batch of three texts, and the output of a model for it."""
    fields: dict[str, Any] = {"loss": cases.token_loss} if kind == "own" else {}
    one = job("a", **cases.LANGUAGE | {"model": partial(cases.gpt2, 0.0)}, **fields)
    torch.manual_seed(0)
    given = cases.padded([one.data()[0][i] for i in range(3)])
    batch = batch_on(torch.device("cpu"), given, 3)
    model = one.model()
    return Objective(one), batch, batch.inputs.call(model)


@pytest.mark.parametrize("kind", ["default", "own"])
def test_total_and_predictions(kind: str) -> None:
    """The sum over valid targets, and the logits before each of them."""
    objective, batch, out = made(kind)
    total, count = objective.total(batch, out)
    logits, labels, axis = objective.predictions(batch, out)
    assert (axis, objective.shifted) == (-1, True)
    assert int(count) == int((labels != -100).sum()) == int((batch.labels[:, 1:] >= 0).sum())
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_batches_without_targets() -> None:
    """A sum of 0 with a graph and without NaN, also for a rank that has no samples."""
    objective, batch, out = made("default")
    objective.total(batch, out)
    for samples, labels in ((0, batch.labels), (3, torch.full_like(batch.labels, -100))):
        rows = batch.target | {"labels": labels}
        none = batch_on(torch.device("cpu"), rows, samples)
        model = cases.gpt2(0.0)
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
    if says:
        with pytest.raises(InputError, match=says):
            objective.total(batch, batch.inputs.call(model))
        return
    total, count = objective.total(batch, batch.inputs.call(model))
    assert (objective.shifted, int(count)) == (False, 8)
    assert float(total.detach()) == pytest.approx(8 * float(batch.inputs.call(model)["loss"]))
    assert int(objective.score(batch, batch.inputs.call(model))[1]) == 8
