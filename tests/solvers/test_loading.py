"""Loading kernels in the background, and confining threads to cores."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched_solvers._loading import load, loaded
from optsched_solvers._portfolio import chosen_cores, confined


def test_loaded_module_is_available_even_without_time() -> None:
    """A limit of 0 seconds does not forbid what is there already."""
    assert load(Monitor(Limits(time_limit=60)), "optsched.kernels.longest_path")
    assert loaded("optsched.kernels.longest_path")
    assert load(Monitor(Limits(time_limit=0)), "optsched.kernels.longest_path")


def test_missing_module_raises_every_time() -> None:
    """A failed import is not remembered as loaded."""
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            load(Monitor(Limits(time_limit=60)), "no_such_kernels")


def in_fresh_process(folder: object, script: str) -> str:
    """Run where nothing is compiled; what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_first_answer_does_not_wait_for_the_compiler(tmp_path: object) -> None:
    """A short limit is kept: a verified schedule, a bound, and what was missing."""
    said = in_fresh_process(
        tmp_path,
        """
        import optsched
        from optsched_solvers._loading import loaded
        for problem in (
            optsched.JobShop.read("ta01"),
            optsched.JobArray(
                forward=[[5, 5], [7, 7]], backward=[[9, 9], [11, 11]],
                activation=[[4, 4], [4, 4]], memory=[4, 4], switch=[[1, 1], [1, 1]],
            ),
        ):
            result = optsched.solve(problem, solver="dispatch", time_limit=2.5)
            assert result.status in ("feasible", "optimal") and result.lower_bound > 0, result
            kernels = "optsched.kernels.longest_path", "optsched.kernels.list_schedule"
            there = loaded(*kernels) or result.status == "optimal"
            assert there or "list_schedule" in result.missing, result
        """,
    )
    assert "optsched warmup" in said


@pytest.mark.slow
def test_without_a_limit_the_compiler_is_waited_for(tmp_path: object) -> None:
    """The default seconds do not count what compiling takes."""
    in_fresh_process(
        tmp_path,
        """
        import optsched
        from optsched.solving import limits
        from optsched_solvers._loading import loaded
        limits.DEFAULT_TIME_LIMIT = 0.5
        result = optsched.solve(optsched.JobShop.read("ta01"), "dispatch")
        assert not result.missing, result
        assert loaded("optsched.kernels.longest_path", "optsched.kernels.list_schedule")
        assert result.history[-1].source.startswith("dispatch"), result
        """,
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity calls here")
def test_cores_are_those_allowed_and_given_back() -> None:
    """Never more cores than there are; the thread's own set is restored."""
    allowed = os.sched_getaffinity(0)
    for workers in (1, 2, 1000):
        cores = chosen_cores(workers)
        assert len(cores) == len(set(cores)) == min(workers, len(allowed))
        assert set(cores) <= allowed
    with confined(chosen_cores(1)):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == allowed
