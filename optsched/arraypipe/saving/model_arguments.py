"""`Job.model` in a checkpoint: the keyword arguments of `build_model` that are plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PLAIN: Final = (str, int, float, bool, type(None))


def model_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint notes of `Job.model`: ``model`` the plain entries, ``model_other`` names.

    Plain are strings, integers, floats, booleans, None, and lists, tuples and dictionaries of
    these, not of classes derived from them: what `torch.load(weights_only=True)` reads again.
    """
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return {"model": plain, "model_other": sorted(name for name in given if name not in plain)}


def check_same_arguments(train: Mapping[str, Any], given: Mapping[str, Any], place: Path) -> None:
    """Refuse a job whose plain arguments are not those of its checkpoint.

    What is not plain on either side is not compared, and nothing is with a file that has no such
    field.

    Raises
    ------
    InputError
        The sentence names the first argument that differs, and both values.
    """
    if "model" not in train:
        return
    before, now = train["model"], model_arguments(given)
    apart = {*train["model_other"], *now["model_other"]}
    sides = (before, now["model"])
    for name in [*before, *now["model"]]:
        there = all(name in side for side in sides)
        if name in apart or (there and _same(*(side[name] for side in sides))):
            continue
        told = [f"{side[name]!r:.200}" if name in side else "no such entry" for side in sides]
        raise InputError(
            f"{place}: was written with model[{name!r}] {told[0]}, the job has {told[1]}"
        )


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _same(a: Any, b: Any) -> bool:
    """Equal, a list being as good as a tuple, and no number being equal to no number."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return bool(a == b) or (a != a and b != b)
