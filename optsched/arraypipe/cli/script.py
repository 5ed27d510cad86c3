"""A trainer from a script: ``FILE.py:FUNCTION``, a function without arguments that makes it."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from optsched.arraypipe.trainer import ArrayTrainer


T = TypeVar("T")


def load_trainer(script: str) -> ArrayTrainer:
    """Run a script and call its function, such as ``train.py:make_trainer``.

    The script is imported under the name of its file, so ``if __name__ == "__main__":`` keeps what
    is not for us; its folder is put on the search path, as Python does with a script. An
    `InputError` has the line of the script; without PyTorch it is a `MissingExtra`.
    """
    path, name = script_parts(script)
    module = imported(path)
    make = getattr(module, name, None)
    if make is None:
        raise InputError(f"{path}: has no function {format_json(name)}{_offers(module)}")
    if not callable(make):
        raise InputError(f"{path}:{name}: expected a function, got {make!r:.60}")
    made = guarded(path, make)
    need_torch()
    from optsched.arraypipe.trainer import ArrayTrainer

    if not isinstance(made, ArrayTrainer):
        raise InputError(f"{path}:{name}: expected it to return an ArrayTrainer, got {made!r:.60}")
    return made


def script_parts(script: str) -> tuple[Path, str]:
    """File and function of ``FILE.py:FUNCTION``; `InputError` if it is not one or not there."""
    file, _, name = script.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(f"script: expected FILE.py:FUNCTION, got {format_json(script)}")
    path = Path(file)
    if path.is_dir():
        raise InputError(f"{path}: is a directory, expected a Python file")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    return path, name


def imported(path: Path) -> ModuleType:
    """A Python file as a module; what it raises is an `InputError` with the line."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: expected a Python file, such as train.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    loader = spec.loader
    try:
        guarded(path, lambda: loader.exec_module(module))
    except BaseException:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def guarded(path: Path, call: Callable[[], T]) -> T:
    """What a call into the script gives; whatever it raises becomes a sentence with the line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        own = str(path.resolve())
        places = traceback.extract_tb(error.__traceback__)
        lines = [place.lineno for place in places if place.filename == own]  # the innermost is last
        said = str(error)
        if isinstance(error, OptschedError):
            if not isinstance(error, InputError) or not lines:
                raise
        elif isinstance(error, SystemExit):
            said = (
                "ends the program; put what is only for the command line below "
                'if __name__ == "__main__":'
            )
        elif isinstance(error, ModuleNotFoundError):
            if (error.name or "").partition(".")[0] == "torch":
                raise MissingExtra("the executor", "torch") from None
        elif isinstance(error, SyntaxError):
            lines, said = [error.lineno], f"is not Python ({error.msg})"
        else:
            said = f"raises {type(error).__name__}: {error}"
        line = f":{lines[-1]}" if lines and lines[-1] else ""
        raise InputError(f"{path}{line}: {said}") from error


def _offers(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and not name.startswith("_")
    ]
    return f"; there are {', '.join(names[:8])}" if names else ""


def need_torch() -> None:
    """Say what to install if PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the executor", "torch")
