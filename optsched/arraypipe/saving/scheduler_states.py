"""Learning-rate schedulers in checkpoints: one per stage, also when the cuts have changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from optsched.arraypipe.optimizers import same
from optsched.arraypipe.saving.files import copied
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.job import JobStage

_PER_GROUP: Final = frozenset({
    "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas",
})  # fmt: skip
"""Lists with one value per parameter group; everything else is the same on all stages."""


def scheduler_state(stage: JobStage, title: str) -> dict[str, Any]:
    """State, class and parameter groups (by unsplit names) of a stage's scheduler; ``{}`` if none.

    Parameters
    ----------
    title
        Of the job, for messages.
    """
    scheduler = stage.scheduler
    if scheduler is None:
        return {}
    if not callable(getattr(scheduler, "state_dict", None)):
        raise InputError(
            f"checkpoint: the scheduler of job {title}, a {type(scheduler).__name__}, has no "
            f"state_dict(), so it cannot be kept"
        )
    return {
        "class": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "groups": _groups(stage),
        "state": copied(scheduler.state_dict()),
    }


def restore_scheduler(stage: JobStage, saved: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Give a stage's scheduler the state that a checkpoint has for its parameters."""
    if stage.scheduler is not None:
        assert stage.optimizer is not None
        stage.scheduler.load_state_dict(_state_for(_groups(stage), saved, place))
        rates = getattr(stage.scheduler, "_last_lr", ())
        for group, rate in zip(stage.optimizer.param_groups, rates, strict=False):
            if not group["params"]:  # no parameter has brought it from the checkpoint
                group["lr"] = rate


def check_same_class(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], place: str
) -> None:
    """Refuse a scheduler of another class than the checkpoint's.

    Parameters
    ----------
    saved, now
        `scheduler_state` of every stage that has one, right after they were made.
    """
    kinds = [next(iter({e["class"] for e in table.values()}), "none") for table in (saved, now)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{place}: was written with scheduler {kinds[0]}, the job has {kinds[1]}")


def check_same_settings(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], place: str
) -> None:
    """Refuse a scheduler that was made with other settings than the checkpoint's."""
    for entry in now.values():
        before = _state_for(entry["groups"], saved, place)
        for key in {**before, **entry["state"]}:
            a, b = before.get(key), entry["state"].get(key)
            if not same(a, b):
                raise InputError(
                    f"{place}: was written with scheduler setting {key!r} {a!r}, the job has {b!r}"
                )


def _groups(stage: JobStage) -> list[list[str]]:
    assert stage.optimizer is not None
    names = {id(p): name for name, p in stage.trained}
    return [[names[id(p)] for p in group["params"]] for group in stage.optimizer.param_groups]


def _state_for(
    groups: Sequence[Sequence[str]], saved: Mapping[str, Mapping[str, Any]], place: str
) -> dict[str, Any]:
    """The state of a scheduler over these groups, put together from those of all stages."""
    for entry in saved.values():
        if entry["groups"] == groups:  # the same cut: nothing to put together
            return dict(entry["state"])
    found = {
        name: (row, k)
        for row, entry in enumerate(saved.values())
        for k, group in enumerate(entry["groups"])
        for name in group
    }
    picks = [[found[name] for name in group if name in found] for group in groups]
    for k, group in enumerate(groups):  # the same on all stages that have a parameter of it
        if not group:
            rows = enumerate(saved.values())
            picks[k] = [(row, k) for row, e in rows if k < len(e["groups"]) and e["groups"][k]]
    if not all(picks):
        raise InputError(f"{place}: has no scheduler state for {groups[picks.index([])]}")
    joined = _joined("", [entry["state"] for entry in saved.values()], picks, place)
    assert isinstance(joined, dict)
    return joined


def _joined(
    key: str, rows: Sequence[Any], picks: Sequence[Sequence[tuple[int, int]]], place: str
) -> Any:
    """One value for the values of all old stages; a list per group is put together anew."""
    first = rows[0]
    if type(first) is dict:
        return {k: _joined(k, [row[k] for row in rows], picks, place) for k in first}
    if key == "_schedulers":
        parts = zip(*rows, strict=True)
        return [_joined("", part, picks, place) for part in parts]
    if key in _PER_GROUP:
        values = [[rows[row][k] for row, k in pick] for pick in picks]
    else:
        values = [list(rows)]
    for value in values:
        if not all(same(value[0], other) for other in value):
            raise InputError(
                f"{place}: the schedulers of its stages differ in {key!r}: {value}; resume with "
                f"the cuts that it was written with"
            )
    return [value[0] for value in values] if key in _PER_GROUP else first
