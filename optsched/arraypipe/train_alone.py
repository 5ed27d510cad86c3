"""The reference that a job array must match to the bit: one job trained alone, model unsplit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optsched.errors import MissingExtra, OptschedError

try:
    import torch

    from optsched.arraypipe.checkpoint.plain import python_numbers, python_settings
except ModuleNotFoundError:
    raise MissingExtra("train_alone", "torch") from None

from optsched.arraypipe.job import before_calls
from optsched.arraypipe.runtime.blocks import Criterion
from optsched.arraypipe.runtime.losses import first_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import Data, Job


class NotIdentical(OptschedError):
    """A job array and training alone differ; the message names the tensors."""


@dataclass(frozen=True, eq=False)
class Trained:
    """Everything that training changes, under the names of the unsplit model.

    `optimizer` maps a parameter to its optimizer state (``exp_avg``, ``step``, ...); `losses` has
    one value per iteration.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    losses: tuple[float, ...]


def train_alone(
    build_model: Callable[..., torch.nn.Module],
    job: Job,
    cuts: Sequence[str | int],
    loss: Callable[[Any, Any], torch.Tensor],
    data: Data,
    steps: int,
    device: str | torch.device = "cpu",
) -> Trained:
    """Train one job by itself: plain PyTorch, one optimizer over all parameters.

    Micro-batches run forward and backward one after the other. Numbers of NumPy in settings and
    schedules are taken as Python's. All else that it has in common with the
    executor is the seed of the random numbers: a hook in front of the first module of every stage
    sets it to ``job.key(iteration, microbatch, stage)``. The loss is looked at as there: of a batch
    in parts it has to be that of the whole, else `InputError`.

    Parameters
    ----------
    cuts
        Name of the first module of every stage (`ArrayTrainer.cuts`). For an `nn.Sequential` the
        cut indices that `ArrayTrainer` takes will do, and stage 0 may be left out.
    steps
        Number of iterations, from the initial weights.
    device
        Where to train.

    Returns
    -------
    Trained
        Final parameters, buffers and optimizer states, and the losses.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(job.seed)
        model = build_model(**job.model)
        if isinstance(model, (list, tuple, torch.nn.ModuleList)):
            model = torch.nn.Sequential(*model)
        if job.init is not None:
            model.load_state_dict(torch.load(job.init, weights_only=True))
        dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(job.precision)
        if dtype is not None:
            model.to(dtype)
        place = torch.device(device)
        model.to(place)
        named = list(model.named_parameters())
        # in bfloat16 the optimizer works on a float32 copy
        copies = [(n, torch.nn.Parameter(p.detach().float(), p.requires_grad)) for n, p in named]
        masters = copies if job.precision == "bf16" else named
        optimizer = python_settings(job.optimizer(list(masters)))
        scheduler = None if job.scheduler is None else job.scheduler(optimizer)
        python_numbers(optimizer, scheduler)
        now = [0, 0]  # iteration, micro-batch

        def reseed(stage: int) -> Callable[[], None]:
            def hook() -> None:
                key = job.key(now[0], now[1], stage)
                torch.default_generator.manual_seed(key)
                if place.type == "cuda":
                    torch.cuda.default_generators[place.index or 0].manual_seed(key)

            return hook

        for stage, name in enumerate(_beginnings(model, cuts)):
            before_calls(model.get_submodule(name), reseed(stage))
        losses = []
        compare: Any = None  # the loss of a batch with those of its parts
        batches = iter(data(job, 0))
        for iteration in range(steps):
            whole_input, whole_target = next(batches)
            parts = list(_parts(whole_input, whole_target, job.microbatches))
            batch = whole_target, [n for n, _, _ in parts]
            total = sum(batch[1])
            value = 0.0
            for microbatch, (n, x, target) in enumerate(parts):
                now[:] = [iteration, microbatch]
                output, aim = model(_moved(x, place, dtype)), _moved(target, place)
                end = Criterion(loss, aim, n / total)
                if iteration == microbatch == 0:
                    own = model.parameters()
                    weighted, compare = first_loss(end, loss, aim, own, batch, output)
                else:
                    weighted = end(output)
                    if compare is not None and not microbatch:
                        compare(batch, iteration, output)
                torch.autograd.backward(weighted)
                value += weighted.item()
            if masters is copies:
                for (_, master), (_, p) in zip(masters, named, strict=True):
                    master.grad = None if p.grad is None else p.grad.float()
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in masters], job.clip_norm)
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(value)
            elif scheduler is not None:
                scheduler.step()
            python_numbers(optimizer, scheduler)
            if masters is copies:
                with torch.no_grad():
                    for (_, master), (_, p) in zip(masters, named, strict=True):
                        p.copy_(master)
            model.zero_grad(set_to_none=True)
            losses.append(value)
    return Trained(
        {name: p.detach() for name, p in named},
        dict(model.named_buffers()),
        {name: dict(optimizer.state[p]) if p in optimizer.state else {} for name, p in masters},
        tuple(losses),
    )


def _beginnings(model: torch.nn.Module, cuts: Sequence[str | int]) -> list[str]:
    """Name of the first module of every stage."""
    if not isinstance(model, torch.nn.Sequential):
        return [str(cut) for cut in cuts]
    children = list(model._modules)
    names = [children[cut] if isinstance(cut, int) else cut for cut in cuts]
    begins = bool(names) and names[0].partition(".")[0] in ("", children[0])
    return names if begins else [children[0], *names]


def differences(got: Trained, alone: Trained) -> list[str]:
    """Every tensor and number in which two trainings differ by a bit, one sentence each."""
    found = []
    for what in ("parameters", "buffers"):
        found += _compared(what[:-1], getattr(got, what), getattr(alone, what))
    for name in sorted(got.optimizer.keys() | alone.optimizer.keys()):
        found += _compared(
            f"optimizer state of {name},",
            got.optimizer.get(name, {}),
            alone.optimizer.get(name, {}),
        )
    for step, (a, b) in enumerate(zip(got.losses, alone.losses, strict=False)):
        if a != b:
            found.append(f"loss of iteration {step}: {a!r}, alone {b!r}")
    if len(got.losses) != len(alone.losses):
        found.append(f"{len(got.losses)} iterations, alone {len(alone.losses)}")
    return found


def _compared(what: str, got: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    found = [f"{what} {name}: only on one side" for name in sorted(got.keys() ^ alone.keys())]
    for name in sorted(got.keys() & alone.keys()):
        a, b = got[name], alone[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                found.append(f"{what} {name}: {a!r}, alone {b!r}")
        elif a.device != b.device:
            found += _compared(what, {name: a.cpu()}, {name: b.cpu()})
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                f"{what} {name}: {a.dtype} {tuple(a.shape)}, alone {b.dtype} {tuple(b.shape)}"
            )
        elif not torch.equal(a, b):
            count = int((a != b).sum())
            found.append(f"{what} {name}: {count} of {a.numel()} values differ")
    return found


def _moved(x: Any, place: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Tensors on the device; floating point inputs in the precision of the job."""
    if isinstance(x, tuple):
        return tuple(_moved(t, place, dtype) for t in x)
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(place, dtype if x.is_floating_point() else None)


def _parts(x: Any, target: Any, count: int) -> Any:
    """Rows ``(samples, input, target)`` per micro-batch."""
    if count == 1:
        return [(1, x, target)]
    many = zip(_pieces(x, count), _pieces(target, count), strict=True)
    return [((a[0] if isinstance(a, tuple) else a).shape[0], a, b) for a, b in many]


def _pieces(value: Any, count: int) -> list[Any]:
    if isinstance(value, tuple):
        return list(zip(*(t.tensor_split(count) for t in value), strict=True))
    return list(value.tensor_split(count))
