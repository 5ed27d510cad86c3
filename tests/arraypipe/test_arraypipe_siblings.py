"""Jobs whose stages differ in shapes are refused; what leaves shapes alone may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, sgd, trainer  # noqa: E402
from torch import nn  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe.model.checks import check_sibling, shapes_of  # noqa: E402
from optsched.arraypipe.train_alone import differences  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SENTENCE = (
    r"job wide: '0.weight' is a parameter of shape \(13, 6\), in job job0 a parameter of shape "
    r"\(12, 6\); .* train this one in an array of its own"
)


def wide(seed: int = 1, **more: Any) -> Job:
    """A job with a larger model."""
    return Job(seed, 8, sgd, name="wide", model={"width": 13}, **more)


def exact(array: Any, result: Any, steps: int) -> bool:
    """Whether all jobs have the bits that they have alone."""
    rows = enumerate(result.trained)
    return all(differences(got, array.train_alone(j, steps)) == [] for j, got in rows)


def normed(norm: bool = True, masked: bool = False) -> nn.Sequential:
    """Three stages of the tiny model; a layer without parameters, or a buffer, may be missing."""
    model = build_model()
    if not norm:
        model[6] = nn.Identity()
    if masked:
        model[3].register_buffer("mask", torch.ones(3), persistent=False)
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"norm": False}, r"job job1: '6.weight' is missing, in job job0 a parameter of shape"),
        ({"masked": True}, r"'3.mask' is a buffer of shape \(3,\), in job job0 missing"),
    ],
)
def test_missing_and_more_tensors_are_named(model: dict[str, Any], sentence: str) -> None:
    """Parameters, and buffers that no state dict has."""
    array = trainer([Job(0, 8, sgd), Job(1, 8, sgd, model=model)], build_model=normed)
    with pytest.raises(InputError, match=sentence):
        array.run(random_schedule([1, 1], 3), 2)


@pytest.mark.parametrize("queue", [False, True])
def test_other_shapes_are_refused_before_anything_is_written(tmp_path: Path, queue: bool) -> None:
    """By `run` and by `profile`; no job has been trained, no folder made."""
    jobs = [Job(0, 8, adamw), wide()]
    array = trainer(jobs)
    schedule = random_schedule([1] * (1 if queue else 2), 3)
    with pytest.raises(InputError, match=SENTENCE):
        array.run(schedule, 2, checkpoint=tmp_path / "ckpt", queue=queue)
    with pytest.raises(InputError, match=SENTENCE):
        array.profile()
    assert not list(tmp_path.iterdir())
    alone = trainer(jobs[1:])
    assert exact(alone, alone.run(random_schedule([1], 3), 2), 2)


def varied(p: float = 0.3, frozen: bool = False) -> nn.Sequential:
    """A model whose tensors have always the same shapes."""
    model = build_model()
    model[2].p = p
    model[3].requires_grad_(not frozen)
    return model


def test_models_of_equal_shapes_may_differ() -> None:
    """Dropout, frozen layers, and precisions; all reach the bits that they reach alone."""
    changes: list[dict[str, Any]] = [
        {}, {"model": {"p": 0.7}}, {"model": {"frozen": True}}, {"precision": "bf16"},
    ]  # fmt: skip
    jobs = [Job(j, 8, adamw, **more) for j, more in enumerate(changes)]
    array = trainer(jobs, build_model=varied)
    result = array.run(random_schedule([1] * 4, 3, seed=2), 3)
    assert exact(array, result, 3)


def test_a_refill_of_another_shape_fails_alone() -> None:
    """The next one takes the seat."""
    first, late = Job(0, 8, adamw), [wide(7), Job(8, 8, sgd, name="other")]
    array, (bad, _) = trainer([first]), late
    result = array.run(random_schedule([1], 3), 3, refill=lambda job: late.pop(0) if late else None)
    assert bad.status == "failed" and "in an array of its own" in str(bad.error)
    assert array.titles == ["job0", "other"]
    assert exact(array, result, 3)


def test_the_first_job_of_a_run_says_what_is_equal() -> None:
    """Not an example that another trainer has been made of."""
    array = trainer([Job(0, 8, sgd)]).with_jobs([wide(1), Job(2, 8, sgd, model={"width": 13})])
    result = array.run(random_schedule([1, 1], 3), 2)
    assert exact(array, result, 2)


def test_shapes_not_known_yet_equal_only_themselves() -> None:
    """A model of lazy modules that have not been run."""
    own, other = shapes_of(nn.LazyLinear(3)), shapes_of(nn.Linear(3, 3))
    check_sibling(own, "b", own, "a")
    with pytest.raises(InputError, match=r"job b: 'weight' is a parameter of a shape not known"):
        check_sibling(own, "b", other, "a")


@pytest.mark.parametrize("shared", [nn.Linear(12, 12), nn.BatchNorm1d(12, affine=False)])
def test_jobs_do_not_share_what_changes(shared: nn.Module) -> None:
    """They would train it in turn, which no schedule could make right."""
    array = trainer(
        [Job(0, 8, sgd), Job(1, 8, sgd)],
        build_model=lambda: nn.Sequential(nn.Linear(6, 12), shared, nn.Linear(12, 4)),
        stages=[1, 2],
    )
    with pytest.raises(InputError, match=r"jobs job0 and job1 have the same '1\..*new modules"):
        array.run(random_schedule([1, 1], 3), 2)


def test_frozen_weights_may_be_shared() -> None:
    """A backbone that is loaded once; not where states are moved about in slots."""
    backbone = nn.Linear(6, 12).requires_grad_(False)
    array = trainer(
        [Job(0, 8, sgd, recompute=True), Job(1, 8, sgd, recompute=True)],
        build_model=lambda: nn.Sequential(backbone, nn.Tanh(), nn.Linear(12, 4)),
        stages=[1, 2],
    )
    result = array.run(random_schedule([1, 1], 3), 2)
    assert exact(array, result, 2)
    array.memory = 10**9
    with pytest.raises(InputError, match=r"have the same '0\.weight'"):
        array.run(random_schedule([1, 1], 3), 2)


def test_lazy_modules_are_run_once_first() -> None:
    """There is nothing to give an optimizer yet."""
    with pytest.raises(InputError, match=r"'1\.weight' of job job0 has no shape yet"):
        trainer(
            [Job(0, 8, sgd)],
            build_model=lambda: nn.Sequential(nn.Linear(6, 12), nn.LazyLinear(4)),
            stages=[1],
        )
