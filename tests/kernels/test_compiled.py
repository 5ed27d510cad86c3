"""Entries and helpers: compiled once a machine, kept by content, finished by others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError
from strategies import schedules

from optsched import Csr, CyclicOrder, JobArray, Schedule
from optsched.errors import InputError
from optsched.kernels import compile as compiled
from optsched.kernels import longest_path
from optsched.kernels.background import LOCKS, LOG
from optsched.kernels.compile import INT, INTS, copy, entry, helper
from optsched.kernels.plain_python import in_python, run
from optsched.model.graph import evaluate as by_python
from optsched.testing.random_problems import random_graph

if TYPE_CHECKING:
    from random import Random

SMALL = "optsched_solvers.shop.tabu.path_relinking:count_inversions"


def made(factor: int, doc: str = "", inner: int = 1) -> Any:
    """A kernel over a helper; what it computes is in a constant and in the helper's constant."""

    @helper(INT, INT)
    def scaled(x):  # type: ignore[no-untyped-def]
        return x * inner

    @entry(INT, INTS)
    def total(values):  # type: ignore[no-untyped-def]
        s = 0
        for k in range(len(values)):
            s += scaled(values[k]) * factor
        return s

    total.__doc__ = doc
    return total


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled kernels are kept in a folder of the test's own."""
    monkeypatch.setattr(compiled, "folders", lambda: (tmp_path,))
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path)
    return tmp_path


def test_an_entry_is_compiled_at_its_first_call(here: Path) -> None:
    """Defining costs nothing; a second process would find it on disk."""
    kernel = made(3)
    assert not kernel.ready
    assert not kernel.stored
    assert kernel(np.array([1, 2])) == 9
    assert kernel.ready
    assert kernel.stored
    again = made(3)
    assert again.ready
    assert again(np.array([1, 2])) == 9


def test_a_name_says_what_a_kernel_is_made_of(here: Path) -> None:
    """Constants of its own and of helpers count, documentation does not."""
    names = {made(f, inner=k)._cache.name for f in (2, 3) for k in (1, 5)}
    assert len(names) == 4
    assert made(2, "a")._cache.name == made(2, "b")._cache.name


def test_defaults_and_numbers_of_numpy_are_part_of_the_name() -> None:
    """Machine code contains both."""

    def content(default: int, number: Any) -> str:
        def scaled(x, by=default):  # type: ignore[no-untyped-def]
            return x * by + number

        return compiled.content_of(helper()(scaled))

    assert len({content(1, np.int64(2)), content(3, np.int64(2)), content(1, np.int64(4))}) == 3


def test_what_a_kernel_was_made_of_before_is_removed(here: Path) -> None:
    """The folder does not grow with every change."""
    for factor in (2, 3):
        made(factor)(np.array([1]))
    assert len(list(here.glob("*.nbc"))) == 1


def test_a_file_that_is_cut_off_is_compiled_again(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that was interrupted; it is said, and mended."""
    first = made(4)
    first.prepare()
    path = here / first._cache.name
    path.write_bytes(path.read_bytes()[:100])
    assert made(4)(np.array([2])) == 8
    assert "is damaged" in caplog.text
    assert path.stat().st_size > 100


def test_what_cannot_be_kept_is_used_all_the_same(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, a folder in the place of the file: nothing is left behind but a sentence."""
    kernel = made(9)
    (here / kernel._cache.name).mkdir()
    assert kernel(np.array([2])) == 18
    assert "could not be kept" in caplog.text
    assert len(list(here.iterdir())) == 1


def test_without_a_folder_kernels_work_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only installation."""
    nowhere = (Path("/proc/nowhere"), Path("/proc/none"))
    monkeypatch.setattr(compiled, "folders", lambda: nowhere)
    compiled.folder.cache_clear()
    try:
        for factor in (5, 6):
            assert made(factor)(np.array([2])) == 2 * factor
        assert caplog.text.count("NUMBA_CACHE_DIR") == 1
    finally:
        compiled.folder.cache_clear()


def test_a_helper_that_python_calls_runs_its_source() -> None:
    """It has no wrapper: numba would crash the process."""
    to = np.zeros(3, np.int64)
    copy(to, np.arange(3))
    assert to.tolist() == [0, 1, 2]
    assert isinstance(copy.py_func, FunctionType)


def test_compilers_of_others_infer_the_types_that_they_did() -> None:
    """Operators of kernels decline what numba refuses, such as a condition of no value."""

    @njit  # type: ignore[untyped-decorator, unused-ignore]
    def has_value(x: Any) -> int:
        found = None if x < 0 else x
        return 1 if found else 0

    with pytest.raises(TypingError):
        has_value(1)


def test_small_questions_need_no_compiler(here: Path) -> None:
    """Source and machine code give the same."""
    kernel = made(7)
    assert run(kernel, np.array([1])) == 7
    with in_python():
        assert kernel(np.array([1])) == 7
    assert not kernel.ready
    assert kernel(np.array([1])) == 7
    assert kernel.ready


def script(tmp_path: Path, *lines: str) -> subprocess.Popen[bytes]:
    """A process with no kernel compiled."""
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )


def test_compiling_outlives_who_asked_for_it(tmp_path: Path) -> None:
    """Killed at once, the first caller leaves a warm machine behind."""
    asks = script(
        tmp_path,
        "from optsched.kernels.compile import entries",
        "from optsched.kernels.background import compile_all",
        f"compile_all(entries({SMALL!r}), 1)",
    )
    begun = tmp_path / LOCKS  # what a worker makes first
    until = time.monotonic() + 120
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.01)
    asks.kill()
    asks.wait()
    while not list(tmp_path.glob("*.nbc")) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(list(tmp_path.glob("*.nbc"))) == 1


def test_processes_share_the_work(tmp_path: Path) -> None:
    """Two callers, four workers, one kernel: it is compiled once, and all have it."""
    lines = (
        "from optsched.kernels.compile import entries",
        "from optsched.kernels.background import compile_all",
        f"wanted = entries({SMALL!r})",
        "compile_all(wanted, 2)",
        "assert all(one.ready for one in wanted)",
    )
    both = [script(tmp_path, *lines) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    assert (tmp_path / LOG).read_text().count(SMALL) == 1


# the compiled longest path gives the numbers and the refusals of `optsched.model.graph`


def agree(graph: Schedule, sequences: Csr) -> None:
    """Same heads, tails and makespan, or the same cycle."""
    try:
        expected = by_python(graph, sequences)
    except CyclicOrder as error:
        with pytest.raises(CyclicOrder) as caught:
            longest_path.evaluate(graph, sequences)
        assert caught.value.cycle == error.cycle
        return
    found = longest_path.evaluate(graph, sequences)
    assert np.array_equal(found.heads, expected.head)
    assert np.array_equal(found.tails, expected.tail)
    assert found.makespan == expected.makespan


@given(schedules(max_operations=9))
def test_equals_python_on_feasible_orders(schedule: Schedule) -> None:
    """Gangs, lags, setups, releases, zero durations, operations without resource."""
    assert schedule.sequences is not None
    agree(schedule, schedule.sequences)


@given(st.randoms(use_true_random=False))
def test_equals_python_on_any_orders(rng: Random) -> None:
    """Shuffled orders: the same numbers, or the same cycle."""
    graph = random_graph(rng, 8)
    agree(graph, Csr.of(rng.sample(row, len(row)) for row in graph.users.to_lists()))


def test_wrong_orders_are_refused() -> None:
    """No permutation, no period: the sentences of the Python version."""
    graph = JobArray([[1]], [[1]]).graph()
    with pytest.raises(InputError, match="operation 1 is missing"):
        longest_path.evaluate(graph, Csr.of([[0]]))
