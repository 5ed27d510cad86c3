"""A trainer from a script: ``FILE.py:FUNCTION``, a function without arguments that makes it."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from optsched.arraypipe.trainer import ArrayTrainer


T = TypeVar("T")


def load_trainer(script: str) -> ArrayTrainer:
    """Run a script and call its function.

    The script is imported under the name of its file, so ``if __name__ == "__main__":`` keeps what
    is not for us; its folder is put on the search path, as Python does with a script.

    Parameters
    ----------
    script
        Such as ``train.py:make_trainer``.

    Raises
    ------
    InputError
        There is no such file or function, one of them raises, or the function returns something
        else; the sentence has the line of the script.
    MissingExtra
        Without PyTorch.
    """
    path, name = script_parts(script)
    module = imported(path)
    make = getattr(module, name, None)
    if make is None:
        raise InputError(f"{path}: has no function {format_json(name)}{_offers(module)}")
    if not callable(make):
        raise InputError(f"{path}:{name}: expected a function, got {make!r:.60}")
    made = _guarded(path, make)
    need_torch()
    from optsched.arraypipe.trainer import ArrayTrainer

    if not isinstance(made, ArrayTrainer):
        raise InputError(f"{path}:{name}: expected it to return an ArrayTrainer, got {made!r:.60}")
    return made


def measured(script: str, measure: Callable[[], T]) -> T:
    """What a measurement of a script's jobs gives.

    Raises
    ------
    InputError
        The script's data, model or loss raises; the sentence has its line.
    OptschedError
        As it comes.
    """
    path, _ = script_parts(script)
    try:
        return measure()
    except OptschedError:
        raise
    except Exception as error:
        raise _blamed(path, error) from error


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
        _guarded(path, lambda: loader.exec_module(module))
    except BaseException:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """What a call into the script gives; whatever it raises becomes a sentence."""
    try:
        return call()
    except InputError as error:
        raise InputError(f"{path}{_line(path, error)}: {error}") from error
    except OptschedError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{path}{_line(path, error)}: ends the program; put what is only for "
            'the command line below if __name__ == "__main__":'
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "torch":
            raise MissingExtra("the executor", "torch") from None
        raise InputError(f"{path}{_line(path, error)}: {error}") from error
    except SyntaxError as error:
        where = f":{error.lineno}" if error.lineno else ""
        raise InputError(f"{path}{where}: is not Python ({error.msg})") from error
    except Exception as error:
        raise _blamed(path, error) from error


def _blamed(path: Path, error: Exception) -> InputError:
    """What the script raised, and where."""
    return InputError(f"{path}{_line(path, error)}: raises {type(error).__name__}: {error}")


def _line(path: Path, error: BaseException) -> str:
    """``:line`` of the innermost frame in the script, if there is one."""
    own = str(path.resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == own]
    return f":{lines[-1]}" if lines else ""


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
