r"""File formats, one module each (loaded on use): `standard`, `taillard`, `perfetto`, ...

Examples
--------
>>> from optsched.formats import standard
>>> standard.from_text("1 2\n0 3 1 2\n", "toy").jobs
(((0, 3), (1, 2)),)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    module = f"optsched.formats.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # an optional package is missing
            raise
        raise AttributeError(f"module 'optsched.formats' has no attribute {name!r}") from None
