"""Fixtures of the tests of the executor: one thread for all of them, and a look at memories."""

from __future__ import annotations

import gc
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


OWN = r"(arraypipe_models|arraypipe_lives)"
NEED = {
    name: [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if re.search(rf"^(import|from) ({modules})\b", path.read_text(), re.M)
    ]
    for name, modules in (("torch", f"torch|{OWN}"), ("optuna", "optuna"))
}
"""Files that cannot be imported without a package."""

collect_ignore = [path for name, paths in NEED.items() if find_spec(name) is None for path in paths]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of files that need PyTorch are marked so."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in NEED["torch"]:
            item.add_marker(pytest.mark.torch)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and a busy machine makes them slow."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def frozen() -> None:
    """Every run collects garbage: what earlier tests have imported need not be looked at."""
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_or_skip(request: pytest.FixtureRequest) -> None:
    """Tests that are marked to need PyTorch are skipped without it."""
    if request.node.get_closest_marker("torch"):
        pytest.importorskip("torch")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every memory that a trainer makes."""
    from optsched.arraypipe.memory import manager

    found: list[Any] = []
    honest = manager.memory_of

    def memory_of(*arguments: Any, **options: Any) -> Any:
        found.append(honest(*arguments, **options))
        return found[-1]

    monkeypatch.setattr("optsched.arraypipe.training_run.memory_of", memory_of)
    return found
