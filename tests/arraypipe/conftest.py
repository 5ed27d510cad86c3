"""Fixtures of the tests of the executor: one thread for all of them, and a look at memories."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


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
