"""Losses: what is no mean over the samples, has parameters, or state is refused or named."""

from __future__ import annotations

import io
import random
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import runs
import torch
from arraypipe_models import sgd
from torch import Tensor, nn
from torch.nn import functional as F

from optsched.arraypipe import ArrayTrainer, Job, RunConfig
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.plan.orders import random_schedule
from optsched.arraypipe.runtime.losses import NotMean
from optsched.arraypipe.train_alone import NotIdentical, differences
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLASSES = 5


class Pair(NamedTuple):
    """An output of two tensors."""

    first: Tensor
    second: Tensor


@dataclass
class Answer:
    """An output that is an object."""

    logits: Tensor
    name: str = "answer"


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
            "flat": tokens.flatten(0, 1),
            "times first": tokens.transpose(0, 1),
            "two views": torch.cat([x, 2 * x]),
            "pair": Pair(x, x.tanh()),
            "scalar": Pair(x, x.square().mean()),
            "dict": {"logits": x, "note": "no tensor", "scale": 3},
            "object": Answer(x),
        }.get(self.shape, x)


def build(shape: str = "", norm: bool = True) -> nn.Sequential:
    """Two stages, with layers whose outputs depend on how a batch is cut."""
    middle = nn.BatchNorm1d(8) if norm else nn.ReLU()
    return nn.Sequential(
        nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Linear(8, 3 * CLASSES), Ends(shape)
    )


def zero(shape: str = "", norm: bool = True) -> nn.Sequential:
    """All samples have one loss at first."""
    model = build(shape, norm)
    for parameter in model[3].parameters():
        nn.init.zeros_(parameter)
    return model


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


def by_mask_and_sample(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over samples of the mean over tokens that count."""
    found = by_token(output, target[0], reduction="none").view_as(target[1]) * target[1]
    return (found.sum(1) / target[1].sum(1)).mean()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every sample against all others of the batch."""
    a, b = F.normalize(output[:, :7]), F.normalize(output[:, 7:14])
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def two_views(output: Tensor, target: Tensor) -> Tensor:
    """Two views of every sample; the second ones behind all first ones."""
    return -F.cosine_similarity(*output.chunk(2)).mean()


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """The hardest half of the batch."""
    found = F.mse_loss(output, target, reduction="none").mean(1)
    return found.topk(-(-len(found) // 2)).values.mean()


def positives(output: Tensor, target: Tensor) -> Tensor:
    """Focal loss over the number of positive samples."""
    found = F.binary_cross_entropy_with_logits(output, (target > 0.9).float(), reduction="none")
    return found.sum() / (target > 0.9).sum().clamp(min=1)


def lost(output: Tensor, target: Tensor) -> Tensor:
    """Mean over targets that are known."""
    known = target > 0.3
    return F.mse_loss(output[known], target[known])


def normalised(output: Tensor, target: Tensor) -> Tensor:
    """Always one; only its gradient depends on the batch."""
    value = F.mse_loss(output, target)
    return value / value.detach()


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Outputs have time first; a mean over samples."""
    long = torch.full((output.shape[1],), 3), torch.full((output.shape[1],), 1)
    return F.ctc_loss(output.log_softmax(2), target.clamp(1)[:, None], *long, zero_infinity=True)


class Row(NamedTuple):
    """A loss; whether it is a mean over samples; its targets and outputs."""

    loss: Any
    is_mean: bool
    targets: Callable[[torch.Generator, int], Any] = classes
    shape: str = ""


WEIGHTS = torch.linspace(1, 2, 3 * CLASSES)
LOSSES = {
    "cross entropy": Row(F.cross_entropy, True),
    "module": Row(nn.CrossEntropyLoss(label_smoothing=0.1), True),
    "squares": Row(nn.MSELoss(), True, numbers),
    "huber": Row(nn.SmoothL1Loss(), True, numbers),
    "logits": Row(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), True, numbers),
    "probabilities": Row(lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), True, numbers),
    "batchmean": Row(
        lambda y, t: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"), True, numbers
    ),
    "tokens": Row(by_token, True, tokens, "tokens"),
    "flat tokens": Row(by_token, True, tokens, "flat"),
    "time first": Row(ctc, True, classes, "times first"),
    "mask by sample": Row(by_mask_and_sample, True, masked, "tokens"),
    "two views": Row(two_views, True, classes, "two views"),
    "pair": Row(lambda y, t: F.mse_loss(y.first, t) + y.second.abs().mean(), True, numbers, "pair"),
    "dict": Row(lambda y, t: y["scale"] * F.cross_entropy(y["logits"], t), True, classes, "dict"),
    "object": Row(lambda y, t: F.cross_entropy(y.logits, t), True, classes, "object"),
    "critic": Row(lambda y, t: -y.float().mean(), True),
    "categorical": Row(
        lambda y, t: -torch.distributions.Categorical(probs=y.softmax(1)).log_prob(t).mean(), True
    ),
    "sum": Row(nn.CrossEntropyLoss(reduction="sum"), False),
    "sum of a function": Row(lambda y, t: F.mse_loss(y, t, reduction="sum"), False, numbers),
    "over a fixed size": Row(lambda y, t: (y - t).square().sum() / 12, False, numbers),
    "weights by class": Row(nn.CrossEntropyLoss(weight=WEIGHTS), False),
    "weights in a function": Row(partial(F.cross_entropy, weight=WEIGHTS), False),
    "ignored class": Row(nn.CrossEntropyLoss(ignore_index=2), False),
    "padding": Row(by_token, False, padded, "tokens"),
    "flat padding": Row(by_token, False, padded, "flat"),
    "mask": Row(by_mask, False, masked, "tokens"),
    "contrastive": Row(contrastive, False),
    "hardest": Row(hardest, False, numbers),
    "positives": Row(positives, False, numbers),
    "known": Row(lost, False, numbers),
    "root": Row(lambda y, t: F.mse_loss(y, t).sqrt(), False, numbers),
    "spread": Row(lambda y, t: -y.var(0, unbiased=False).sum(), False),
    "batch norm": Row(lambda y, t: F.mse_loss(y / (y.std(0) + y.mean()), t), False, numbers),
    "only the gradient": Row(normalised, False, numbers),
    "object, sum": Row(
        lambda y, t: F.cross_entropy(y.logits, t, reduction="sum"), False, classes, "object"
    ),
}
SPLITS = [(12, 2), (11, 3), (7, 5), (4, 4)]


def trainer(row: Row, split: tuple[int, int], model: Any = build, **changes: Any) -> ArrayTrainer:
    """A job of a loss, cut into micro-batches."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for iteration in range(start, 99):
            draw = torch.Generator().manual_seed(iteration)
            x = torch.randn(job.batch_size, 6, generator=draw)
            yield x, row.targets(draw, job.batch_size)

    model_of = {"shape": row.shape, "norm": split[0] // split[1] > 1}  # it needs two samples
    job = Job(1, split[0], sgd, microbatches=split[1], model=model_of, **changes)
    return ArrayTrainer(model, batches, jobs=[job], stages=[3], loss=row.loss)


def run(made: ArrayTrainer, steps: int) -> Any:
    """Train in some order."""
    order = random_schedule([job.microbatches for job in made.jobs], len(made.stages))
    return runs.run(made, order, steps, on_error="raise")


@pytest.mark.parametrize("name", LOSSES)
def test_mean_over_samples(name: str) -> None:
    """What is one is trained, alone and in an array; what is none is refused by both."""
    row = LOSSES[name]
    for split in SPLITS:
        still = split == (11, 3) and name not in ("spread", "batch norm")
        made = trainer(row, split, zero if still else build)
        if row.is_mean:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                made.train_alone(0, 1)
            continue
        # a batch may by chance have parts with equal weights
        with pytest.raises(NotMean, match="loss: expected a mean over the samples"):
            made.train_alone(0, 6)
    if row.is_mean:
        run(trainer(row, (11, 3)), 2)
    else:
        with pytest.raises(NotMean, match="job job0: loss: expected a mean over the samples"):
            run(trainer(row, (11, 3)), 1)
    trainer(row, (7, 1)).train_alone(0, 1)


def late(first: int, changed: Callable[[Any], Any]) -> Callable[[Job, int], Iterator[Any]]:
    """Tokens whose targets are changed from an iteration on."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for iteration in range(start, 99):
            draw = torch.Generator().manual_seed(iteration)
            x, y = torch.randn(job.batch_size, 6, generator=draw), tokens(draw, job.batch_size)
            yield x, changed(y) if iteration >= first else y

    return batches


def one_padded(y: Tensor) -> Tensor:
    """One token of the last sample does not count."""
    y[-1, 2] = -100
    return y


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("first", "counts"), [(1, (3, 4)), (4, (2, 2)), (7, (1, 3))])
def test_first_padding_late(first: int, counts: tuple[int, int], recompute: bool) -> None:
    """A batch that is weighted wrongly ends its job, before its update, and no other job."""
    jobs = [
        Job(j, 8, sgd, microbatches=n, recompute=recompute, model={"shape": "tokens"})
        for j, n in enumerate(counts)
    ]
    made = ArrayTrainer(build, late(first, one_padded), jobs=jobs, stages=[3], loss=by_token)
    result = runs.run(made, random_schedule(counts, 2), 9)
    for j, (job, n) in enumerate(zip(jobs, counts, strict=True)):
        if n == 1:
            assert job.status == "done" and len(result.losses[j]) == 9
            continue
        assert job.error is not None and job.error.iteration == first
        assert "expected a mean over the samples" in str(job.error)
        assert made.train_alone(j, first).losses == result.losses[j][:first]
        with pytest.raises(NotMean):
            made.train_alone(j, first + 1)


def test_fit_refuses_before_training() -> None:
    """Also what its second batch shows first."""
    jobs = [Job(0, 8, sgd, microbatches=2, model={"shape": "tokens"})]
    made = ArrayTrainer(build, late(1, one_padded), stages=[3], loss=by_token)
    with pytest.raises(NotMean, match="expected a mean over the samples"):
        made.fit(jobs, 3, schedule=random_schedule([2], 2), config=RunConfig(verbose=False))
    assert jobs[0].status != "done"


def test_large_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some samples are compared, others in every batch."""
    monkeypatch.setattr("optsched.arraypipe.runtime.losses._BYTES", 4)
    for first in (0, 3):
        job = Job(0, 8, sgd, microbatches=3, model={"shape": "tokens"})
        data = late(first, lambda y: y.masked_fill(torch.arange(24).view(8, 3) > 13, -100))
        made = ArrayTrainer(build, data, jobs=[job], stages=[3], loss=by_token)
        with pytest.raises((NotMean, JobFailed), match="expected a mean over the samples"):
            run(made, 12)


UNKNOWN: dict[str, tuple[Row, str]] = {
    "random": (
        Row(lambda y, t: F.cross_entropy(y + torch.randn_like(y), t), True),
        "called twice",
    ),
    "scalar": (
        Row(lambda y, t: y.first.square().mean() + y.second, True, classes, "scalar"),
        "other outputs than rows",
    ),
    "no rows": (Row(lambda y, t: y.second, True, classes, "scalar"), "other outputs than rows"),
    "fixed size": (
        Row(lambda y, t: F.cross_entropy(y.view(4, 15), t), True),
        "RuntimeError: shape",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_comparable(name: str) -> None:
    """What cannot be compared is trained, with a warning."""
    row, sentence = UNKNOWN[name]
    with pytest.warns(UserWarning, match=f"loss: cannot be compared .*{sentence}"):
        run(trainer(row, (8, 2)), 1)


class Angles(nn.Module):
    """A loss with a weight for every class."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES, 3 * CLASSES), requires_grad=trained)

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of cosines."""
        return F.cross_entropy(F.linear(F.normalize(y), F.normalize(self.weight)), target)


ANGLES = Angles()
SCALE = nn.Parameter(torch.ones(()))


def of_global(y: Tensor, target: Tensor) -> Tensor:
    """Uses a module of its script."""
    return ANGLES(y, target)


def of_closure(temperature: Tensor) -> Any:
    """A learnable temperature."""
    return lambda y, target: F.cross_entropy(y * temperature, target)


def twice(inner: Any, y: Tensor, target: Tensor) -> Tensor:
    """Another loss, doubled."""
    return 2 * inner(y, target)


class Holds:
    """A plain object that is called."""

    def __init__(self) -> None:
        self.inner = Angles()

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        """The loss of what it holds."""
        return self.inner(y, target)

    def method(self, y: Tensor, target: Tensor) -> Tensor:
        """The same."""
        return self.inner(y, target)


TRAINABLE = {
    "module": (Angles(), "'weight'"),
    "global": (of_global, "'weight'"),
    "closure": (of_closure(SCALE), "'SCALE'"),
    "closure of a module": (partial(twice, Angles()), "'weight'"),
    "function": (lambda y, t: twice(ANGLES, y, t), "'weight'"),
    "object": (Holds(), "'weight'"),
    "method": (Holds().method, "'weight'"),
    "tensor": (of_closure(torch.ones((), requires_grad=True)), "a tensor"),
}


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_loss_with_parameters(name: str, microbatches: int) -> None:
    """It would never be trained: refused by name, with the way out."""
    loss, what = TRAINABLE[name]
    made = trainer(Row(loss, True), (7, microbatches))
    with pytest.raises(
        InputError, match=f"loss: its parameter .{what}, .* never be trained.*last stage"
    ):
        run(made, 1)
    with pytest.raises(
        InputError, match=f"loss: its parameter .{what}, .* never be trained.*last stage"
    ):
        made.train_alone(0, 1)


def test_loss_with_frozen_parameters() -> None:
    """Constants, and modules that are called without gradients, are no obstacle."""
    teacher = nn.Linear(3 * CLASSES, 3 * CLASSES)

    def distilled(y: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            aim = teacher(F.one_hot(target, 3 * CLASSES).float())
        return F.mse_loss(y, aim)

    for loss in (Angles(trained=False), of_closure(torch.ones(())), distilled):
        assert trainer(Row(loss, True), (11, 3)).check_exact(2) == []


class Noise(torch.utils.data.Dataset[Any]):
    """Adds noise of a generator of its own."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """A noisy sample."""
        return torch.full((6,), float(k)) + torch.randn(6, generator=self.draw), torch.tensor(k % 5)


def of_draw(draw: Callable[[], float]) -> Any:
    """Batches that depend on something else than the job and the iteration."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for k in range(start, 99):
            yield torch.full((8, 6), float(draw() + k)), torch.arange(8) % CLASSES

    return batches


def plain(job: Job, start: int) -> Iterator[Any]:
    """Batches as they should be."""
    for k in range(start, 99):
        draw = torch.Generator().manual_seed(k)
        yield torch.randn(8, 6, generator=draw), classes(draw, 8)


class Counting(nn.Module):
    """Scales by what it counts; every kind of state that is no buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps, self.decay, self.seen = kind, 0, 1.0, False
        self.row: list[float] = [0.0]
        self.queue: deque[float] = deque([0.0], maxlen=3)
        self.stats, self.average = {"calls": 0}, torch.zeros(())
        self.numbers = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        """Use it, and go on with it."""
        if self.kind == "steps":
            self.steps += 1
        elif self.kind == "decay":
            self.decay *= 0.9
        elif self.kind == "row":
            self.row.append(self.row[-1] + 1)
        elif self.kind == "queue":
            self.queue.append(self.queue[-1] + 1)
        elif self.kind == "stats":
            self.stats["calls"] += 1
        elif self.kind == "average":
            self.average = self.average + x.detach().mean() + 1
        elif self.kind == "seen" and not self.seen:
            self.seen, self.decay = True, 2.0
        drawn = {"random": random.random, "numbers": self.numbers.random}
        drawn["numpy"] = np.random.rand
        more = drawn.get(self.kind, float)()
        counts = self.steps + self.row[-1] + self.queue[-1] + self.stats["calls"]
        return x * (self.decay + counts + self.average + more)


class Center(nn.Module):
    """A loss with a running mean."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        """Distance from it."""
        self.center = 0.5 * self.center + y.detach().mean()
        return (y - self.center - target[:, None]).square().mean()


def counted(kind: str = "") -> Any:
    """A model with a layer that counts."""
    return lambda: nn.Sequential(nn.Linear(6, 15), Counting(kind), nn.Linear(15, 15))


def unseeded() -> nn.Module:
    """Weights that the seed does not give."""
    model = nn.Linear(6, 15)
    nn.init.constant_(model.weight, NUMPY.random())
    return nn.Sequential(model, nn.Linear(15, 15))


def drawing(draw: Callable[[], Any]) -> Any:
    """A loss that draws a weight."""
    return lambda y, target: F.cross_entropy(y, target) * (1 + float(draw()))


GENERATOR = torch.Generator().manual_seed(0)
NUMPY = np.random.default_rng(0)
GLOBAL = "%s depends on the global random numbers of '%s'"
STATE = "gives other values when called again"
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "dataset with a generator": ({"data": Noise()}, f"data {STATE}"),
    "data with a counter": ({"data": of_draw(count().__next__)}, f"data {STATE}"),
    "data with a file": ({"data": of_draw(lambda: float(FILE.read(1)))}, f"data {STATE}"),
    "data, random": (
        {"data": of_draw(random.random)},
        GLOBAL % ("data", "random"),
    ),
    "data, numpy": (
        {"data": of_draw(np.random.rand)},
        GLOBAL % ("data", "numpy"),
    ),
    "data, torch": (
        {"data": of_draw(lambda: float(torch.rand(())))},
        GLOBAL % ("data", "torch"),
    ),
    "loss with a generator": (
        {"loss": drawing(lambda: torch.rand((), generator=GENERATOR))},
        f"loss {STATE}",
    ),
    "loss, numpy generator": ({"loss": drawing(NUMPY.random)}, f"loss {STATE}"),
    "loss with a counter": ({"loss": drawing(count().__next__)}, f"loss {STATE}"),
    "loss with a buffer": ({"loss": Center()}, f"loss {STATE}"),
    "loss, random": (
        {"loss": drawing(random.random)},
        GLOBAL % ("loss", "random"),
    ),
    "loss, numpy": (
        {"loss": drawing(np.random.rand)},
        GLOBAL % ("loss", "numpy"),
    ),
    "model, numpy": ({"model": counted("numpy")}, GLOBAL % ("the forward", "numpy")),
    "model, random": (
        {"model": counted("random")},
        GLOBAL % ("the forward", "random"),
    ),
    "weights": ({"model": unseeded}, f"build_model {STATE}"),
    "model, counter": (
        {"model": counted("steps")},
        "the forward, which changes 'steps' of Counting, gives",
    ),
}
FILE = io.StringIO("0123456789" * 1000)


@pytest.mark.filterwarnings("ignore:loss:UserWarning")
@pytest.mark.parametrize("name", CAUSES)
def test_not_identical_names_the_cause(name: str) -> None:
    """Data, loss, model, or its making; and the kind of state."""
    given, sentence = CAUSES[name]
    row = {"data": plain, "loss": F.cross_entropy, "model": counted()} | given
    jobs = [
        Job(j, 8, sgd, recompute=name == "model, counter", microbatches=1 + ("random" in name))
        for j in range(3)
    ]
    made = ArrayTrainer(row["model"], row["data"], stages=[1], loss=row["loss"])
    order = random_schedule([job.microbatches for job in jobs], 2)
    with pytest.raises(NotIdentical, match=f"(?s); job job0: .*{sentence}"):
        made.fit(jobs, 3, schedule=order, config=RunConfig(verbose=False))


@pytest.mark.parametrize(
    "kind", ["steps", "decay", "row", "queue", "stats", "average", "seen", "none"]
)
def test_checkpoint_warns_of_attributes(kind: str, tmp_path: Path) -> None:
    """Once, by name; not if nothing changes, and not without checkpoints."""
    jobs = [Job(j, 8, sgd) for j in range(2)]
    made = ArrayTrainer(counted(kind), plain, jobs=jobs, stages=[1], loss=F.cross_entropy)
    order = random_schedule([1, 1], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(made, order, 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = runs.run(made, order, 2, checkpoint=tmp_path)
    named = [str(one.message) for one in found if "no checkpoint keeps" in str(one.message)]
    assert len(named) == (kind != "none")
    if named:
        assert f"'{kind}'" in named[0] and "of Counting '1'" in named[0]
        for j in range(2):  # the look at the first forward has changed nothing
            assert differences(result.trained[j], made.train_alone(j, 2)) == []


def test_caches_are_no_state(tmp_path: Path) -> None:
    """What a forward stores without going on with it is not warned of."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[int, Tensor] = {}
            self.mask: Tensor | None = None
            self.sizes: set[int] = set()
            self.limit, self.names = 8, ["a"]

        def forward(self, x: Tensor) -> Tensor:
            """Fill caches."""
            self.table[x.shape[0]] = self.mask = torch.ones(x.shape[1])
            self.sizes.add(x.shape[0])
            self.limit = max(self.limit, x.shape[0])
            return x * self.mask

    made = ArrayTrainer(
        lambda: nn.Sequential(nn.Linear(6, 15), Caching()), plain, jobs=[Job(0, 8, sgd)],
        stages=[1], loss=F.cross_entropy,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(made, random_schedule([1], 2), 1, checkpoint=tmp_path)
