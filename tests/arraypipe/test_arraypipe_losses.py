"""Losses: what is no mean over the samples, has parameters, or state is refused or named."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import runs
import torch
from arraypipe_models import adamw, sgd
from runs import array_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.plan.plan import random_schedule
from optsched.arraypipe.runtime.losses import NotMean, factors_of
from optsched.arraypipe.train_alone import differences
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLASSES = 5


@dataclass
class Answer:
    """An output that is an object."""

    logits: Tensor
    name: str = "answer"
    loss: Tensor | None = None


class Ends(nn.Module):
    """The end of the model: shapes an output as a loss wants it."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        """Classes by sample, or something made of them."""
        tokens = x.unflatten(1, (3, CLASSES))
        return {
            "tokens": tokens,
            "dict": {"logits": x, "note": "no tensor", "scale": 3},
        }.get(self.shape, x)


def build(shape: str = "", norm: bool = True) -> nn.Sequential:
    """Two stages, with layers whose outputs depend on how a batch is cut."""
    middle = nn.BatchNorm1d(8) if norm else nn.ReLU()
    return nn.Sequential(
        nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Linear(8, 3 * CLASSES), Ends(shape)
    )


def smooth(shape: str = "", norm: bool = True) -> nn.Sequential:
    """The same without layers that look across samples or draw random numbers."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3 * CLASSES), Ends(shape))


def classes(draw: torch.Generator, n: int) -> Tensor:
    """A class for every sample."""
    return torch.randint(0, CLASSES, (n,), generator=draw)


def tokens(draw: torch.Generator, n: int) -> Tensor:
    """A class for every token."""
    return torch.randint(0, CLASSES, (n, 3), generator=draw)


def padded(draw: torch.Generator, n: int) -> Tensor:
    """Tokens, of which some do not count, more of them in later samples."""
    found = tokens(draw, n)
    for k in range(n):
        found[k, 3 - 2 * k // n :] = -100
    return found


def masked(draw: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Tokens, and which of them count."""
    found = padded(draw, n)
    return found.clamp(min=0), (found >= 0).float()


def numbers(draw: torch.Generator, n: int) -> Tensor:
    """As many numbers as outputs."""
    return torch.rand(n, 3 * CLASSES, generator=draw)


def by_token(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Cross entropy of tokens."""
    return F.cross_entropy(output.reshape(-1, CLASSES), target.reshape(-1), **options)


def by_mask(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over tokens that count."""
    found = by_token(output, target[0], reduction="none") * target[1].flatten()
    return found.sum() / target[1].sum()


class Row(NamedTuple):
    """A loss; whether micro-batches add up; its targets and outputs."""

    loss: Any
    adds_up: bool
    targets: Callable[[torch.Generator, int], Any] = classes
    shape: str = ""


WEIGHTS = torch.linspace(1, 2, 3 * CLASSES)
LOSSES = {
    "dict": Row(lambda y, t: y["scale"] * F.cross_entropy(y["logits"], t), True, classes, "dict"),
    "sum": Row(nn.CrossEntropyLoss(reduction="sum"), True),
    "sum of a function": Row(lambda y, t: F.mse_loss(y, t, reduction="sum"), False, numbers),
    "ignored class": Row(nn.CrossEntropyLoss(ignore_index=2), True),
    "mask": Row(by_mask, False, masked, "tokens"),
}


def trainer(
    row: Row, split: tuple[int, int], model: Any = build, weight: Any = None, **changes: Any
) -> ArrayTrainer:
    """A job of a loss, cut into micro-batches."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for iteration in range(start, 99):
            draw = torch.Generator().manual_seed(iteration)
            x = torch.randn(job.batch_size, 6, generator=draw)
            yield x, row.targets(draw, job.batch_size)

    model_of = {"shape": row.shape, "norm": split[0] // split[1] > 1}  # it needs two samples
    job = Job(1, split[0], sgd, microbatches=split[1], model=model_of, **changes)
    return array_trainer(model, batches, jobs=[job], stages=[3], loss=row.loss, weight=weight)


def run(made: ArrayTrainer, steps: int) -> Any:
    """Train in some order."""
    order = random_schedule([job.microbatches for job in made.jobs], made.n_stages)
    return runs.run(made, order, steps, on_error="raise")


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    """Where they do the loss is trained, alone and in an array; else both are refused."""
    row = LOSSES[name]
    made = trainer(row, (11, 3))
    if row.adds_up:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made.check_exact(2) == []
        return
    with pytest.raises(NotMean, match="loss: expected that micro-batches add up"):
        made.train_alone(0, 1)


class Branches(nn.Linear):
    """A layer with a branch on all samples of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Double a batch with a sum above zero."""
        return super().forward(x) * (2 if x.sum() > 0 else 1)


def test_a_branch_on_the_batch() -> None:
    """Micro-batches of a model that compares samples train, with a warning."""
    x = torch.linspace(-1, 1, 8).repeat(6, 1).T
    made = array_trainer(
        lambda: nn.Sequential(Branches(6, 4), nn.Linear(4, 1)),
        lambda job, start: iter([(x, x[:, :1])] * 2),
        jobs=[Job(0, 8, sgd, microbatches=n) for n in (4, 1)], stages=2, loss=F.mse_loss,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="depend on the other samples, so that 4 micro-batches"):
        made.train_alone(0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train_alone(1, 1)


def hidden(draw: torch.Generator, n: int) -> Tensor:
    """Tokens of which some samples have none that counts."""
    found = tokens(draw, n)
    found[torch.rand(n, 3, generator=draw) < 0.6] = -100
    found[: n // 2] = -100
    return found


WHOLE = {
    "padding": Row(by_token, True, hidden, "tokens"),
    "class weights": Row(nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=1), True),
    "log likelihood": Row(lambda y, t: F.nll_loss(y.log_softmax(1), t), True),
    "sum": Row(nn.MSELoss(reduction="sum"), True, numbers),
}


def same(one: Any, other: Any) -> None:
    """Except for rounding in double precision."""
    assert other.losses == pytest.approx(one.losses, rel=1e-12)
    for key, value in one.parameters.items():
        torch.testing.assert_close(other.parameters[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_accumulation_equals_the_whole_batch(name: str) -> None:
    """Weights after one step of SGD; the loss, too."""
    ends = []
    for count in (1, 3):
        made = trainer(WHOLE[name], (11, count), smooth, precision="fp64")
        ends.append(run(made, 1).trained[0])
    same(*ends)


def test_given_weights() -> None:
    """A function of the target, or a sum; what is no number is refused."""
    sizes = Row(by_mask, True, masked, "tokens")
    assert trainer(sizes, (11, 3), weight=lambda target: target[1].sum()).check_exact(2) == []
    total = Row(lambda y, t: F.mse_loss(y, t, reduction="sum"), True, numbers)
    assert trainer(total, (11, 3), weight="sum").check_exact(2) == []
    with pytest.raises(NotMean):
        trainer(total, (11, 3), weight=lambda target: 3.0).check_exact(1)
    with pytest.raises(InputError, match="weight: expected a number >= 0"):
        trainer(total, (11, 3), weight=lambda target: -1.0).train_alone(0, 1)
    with pytest.raises(InputError, match="weight: expected a function"):
        trainer(total, (11, 3), weight=3.0)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_weights_with_learned_prompts(kind: str) -> None:
    """PEFT puts prompts before the first label, which counts then; prefixes leave labels alone."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    tiny = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=12, n_positions=16)
    settings = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(tiny), settings).eval()
    labels = torch.randint(0, 12, (2, 5))
    labels[1, 3:] = -100
    parts = [{"input_ids": labels[k : k + 1].clamp(0), "labels": labels[k : k + 1]} for k in (0, 1)]
    whole = model(input_ids=labels.clamp(0), labels=labels).loss
    factors = factors_of(None, None, model)(parts)
    total = sum(f * model(**part).loss for f, part in zip(factors, parts, strict=True))
    assert torch.allclose(total, whole)


class Angles(nn.Module):
    """A loss with a weight for every class."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES, 3 * CLASSES), requires_grad=trained)

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of cosines."""
        return F.cross_entropy(F.linear(F.normalize(y), F.normalize(self.weight)), target)


SCALE = nn.Parameter(torch.ones(()))


def test_parameters_of_no_stage() -> None:
    """They would never be trained: refused, with the way out."""
    made = trainer(Row(lambda y, target: F.cross_entropy(y * SCALE, target), True), (7, 3))
    for train in (partial(run, made, 1), partial(made.train_alone, 0, 1)):
        with pytest.raises(InputError, match=r"its parameter of shape \(\) .*never be trained"):
            train()


class Centered(Angles):
    """A loss with a parameter, dropout, and a running mean of what it has seen."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        """Around the mean, which moves in training."""
        if self.training:
            self.center = 0.5 * self.center + 0.5 * y.detach().float().mean()
        return super().forward(F.dropout(y - self.center, 0.2, self.training), target)


def test_a_loss_is_trained(tmp_path: Path) -> None:
    """Every job trains a copy with its optimizer; also clipped, recomputed, and resumed."""
    jobs = [
        Job(j, 8, (sgd, adamw)[j], microbatches=1 + j, precision=("fp32", "bf16")[j],
            recompute=j == 1, clip_norm=(None, 0.5)[j], model={"norm": False})
        for j in range(2)
    ]  # fmt: skip
    loss = Centered()
    row = Row(loss, True)
    made = array_trainer(build, trainer(row, (8, 2)).data, jobs=jobs, stages=[3], loss=loss)
    order = random_schedule([1, 2], 2, update=[0, 1], together=[0, 1], seed=1)
    runs.run(made, order, 2, checkpoint=tmp_path, on_error="raise")
    result = runs.run(made, order, 4, checkpoint=tmp_path, resume=True, on_error="raise")
    for j, got in enumerate(result.trained):
        alone = made.train_alone(j, 4)
        assert differences(replace(got, losses=alone.losses), alone) == []
        assert got.losses == alone.losses[-len(got.losses) :]
        assert not torch.equal(alone.parameters["loss.weight"].float(), loss.weight)
        assert "loss.center" in alone.buffers and "loss.weight" in alone.optimizer
        assert not [name for name, _ in result.models[j].named_parameters() if "loss" in name]
    assert torch.equal(loss.weight, torch.ones_like(loss.weight)) and not loss.center


class Language(nn.Module):
    """A language model with a loss of its own, shifted by one like those of transformers."""

    def __init__(self, shifted: bool = True, encoder: bool = False) -> None:
        super().__init__()
        self.loss_type = "ForCausalLM" if shifted or encoder else "ForTokenClassification"
        self.config = SimpleNamespace(is_encoder_decoder=encoder)
        self.shifted, self.embed = shifted, nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Answer:
        """Scores and loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        pair = (logits[:, :-1], labels[:, 1:]) if self.shifted else (logits, labels)
        loss = F.cross_entropy(pair[0].flatten(0, 1), pair[1].flatten())
        return Answer(logits, loss=loss)


def language(job: Job, start: int) -> Iterator[dict[str, Tensor]]:
    """Padded sequences; some have a label in the first column alone, which the shift drops."""
    for iteration in range(start, 99):
        draw = torch.Generator().manual_seed(iteration)
        ids = torch.randint(0, 9, (job.batch_size, 5), generator=draw)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.4, -100)
        labels[0, 1:] = labels[1, 1:] = -100
        yield {"ids": ids, "labels": labels}


@pytest.mark.parametrize(("shifted", "encoder"), [(True, False), (False, True)])
def test_the_loss_of_the_model(shifted: bool, encoder: bool) -> None:
    """Micro-batches of labels that count, also where a micro-batch has none."""
    model = {"shifted": shifted, "encoder": encoder}
    jobs = [Job(0, 10, sgd, microbatches=n, precision="fp64", model=model) for n in (1, 2, 5)]
    made = array_trainer(Language, language, jobs=jobs, stages=3, loss=None)
    one, *others = run(made, 2).trained
    assert differences(one, made.train_alone(0, 2)) == []
    for other in others:
        same(one, other)
    weighed = array_trainer(Language, language, jobs=jobs[1:2], stages=2, loss=None, weight=len)
    with pytest.raises(NotMean, match="micro-batches add up"):
        weighed.train_alone(0, 1)
