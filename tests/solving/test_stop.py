"""`optsched.stop`: every criterion alone, joined, nested, refused, and inside a search."""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched import Csr, InputError, JobShop, Limits, Progress, Result
from optsched.model.graph import scheduled
from optsched.solving.stop import AnyOf, FirstFeasible, Gap, NoImprovement

if TYPE_CHECKING:
    from optsched import Monitor

TOY = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")


def at(
    elapsed: float = 0.0,
    iteration: int = 0,
    objective: int | None = None,
    lower_bound: int | None = None,
    **rest: Any,
) -> Progress:
    """A moment of a search."""
    return Progress(elapsed, iteration, objective, lower_bound, "tick", **rest)


@pytest.mark.parametrize(
    ("criterion", "before", "after"),
    [
        (Gap(0.1), at(objective=111, lower_bound=100), at(objective=110, lower_bound=100)),
        (Gap(0.1), at(objective=5), at(objective=0, lower_bound=0)),
        (Gap(0.1), at(objective=5, lower_bound=0), at(objective=7, lower_bound=7)),
        (Gap(0), at(objective=101, lower_bound=100), at(objective=100, lower_bound=100)),
        (FirstFeasible(), at(lower_bound=3), at(objective=3)),
        (NoImprovement(4), at(0, 99), at(0, 99, 7)),
        (NoImprovement(4), at(0, 8, 7, best_iteration=5), at(0, 9, 7, best_iteration=5)),
        (NoImprovement(seconds=4), at(99), at(99, 0, 7)),
        (NoImprovement(seconds=4), at(8, 0, 7, best_elapsed=5), at(9, 0, 7, best_elapsed=5)),
        (AnyOf(AnyOf(FirstFeasible()), lambda p: p.elapsed > 3), at(3), at(4)),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, tuple) else "",
)
def test_criteria(criterion: Any, before: Progress | None, after: Progress) -> None:
    """False just before, true from the limit on, and the same when asked again."""
    if before is not None:
        assert not criterion(before) and not criterion(before)
    assert criterion(after) and criterion(after)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gap(-0.1), "Gap: relative: expected a finite number >= 0, got -0.1"),
        (lambda: Gap(None), "Gap: relative"),  # type: ignore[arg-type]
        (lambda: NoImprovement(), "NoImprovement: expected either iterations or seconds"),
        (lambda: NoImprovement(3, 4), "NoImprovement: expected either iterations or seconds"),
        (lambda: NoImprovement(2.5), "NoImprovement: iterations"),  # type: ignore[arg-type]
        (lambda: NoImprovement(seconds=-1), "NoImprovement: seconds"),
        (lambda: AnyOf(), "AnyOf: expected at least one criterion"),
        (lambda: AnyOf(Gap(1), 3), r"AnyOf: criteria\[1\]: expected a criterion"),  # type: ignore[arg-type]
        (lambda: AnyOf(Gap), "got a class"),  # type: ignore[arg-type]
        (lambda: Limits(stop=10), "stop: expected a criterion"),  # type: ignore[arg-type]
        (lambda: Limits(stop=Gap), "stop: expected a criterion .* got a class"),  # type: ignore[arg-type]
    ],
)
def test_wrong_criteria(make: Any, message: str) -> None:
    """Refused when made, by name."""
    with pytest.raises(InputError, match=message):
        make()


# as limits


def test_a_criterion_is_a_limit() -> None:
    """The ten seconds hold only where nothing at all was said."""
    assert Limits().time_limit == 10
    for given in ({"stop": Gap(0.5)}, {"iterations": 5}, {"target": 5}):
        assert Limits(**given).time_limit is None  # type: ignore[arg-type]
    assert Limits(1.0, stop=Gap(0.5)).time_limit == 1


# in a search


LONG = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)], [(0, 9), (1, 9)]], name="long")


class Walker:
    """An engine that works on for ever, ten steps at a time; one schedule after `first` times."""

    name = "walker"
    options = MappingProxyType[str, str]({})

    def __init__(self, first: int = 3, threads: int = 1) -> None:
        self.first, self.threads = first, threads

    def supports(self, problem: Any) -> bool:
        """Everything."""
        return True

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """All threads do the same; the schedule is not good enough to be proved."""
        orders = Csr.of([[0, 3, 4], [2, 1, 5]])
        value = scheduled(problem.graph(), orders).makespan

        def work() -> None:
            while not monitor.should_stop():
                monitor.advance(10)
                if monitor.iteration >= 10 * self.first:
                    monitor.incumbent(orders, value, "walker")
                threading.Event().wait(0.001)

        threads = [threading.Thread(target=work) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Result("unknown")


def test_no_improvement_counts_from_the_last_better_schedule() -> None:
    """Not from the start: here nothing is found in the first 300 steps."""
    result = optsched.solve(LONG, Walker(first=30), stop=NoImprovement(100), time_limit=600)
    assert result.objective is not None


def test_an_exception_of_a_criterion_comes_out() -> None:
    """With the best so far, and no thread left behind."""
    before = threading.active_count()

    def mine(progress: Progress) -> bool:
        return progress.objective is not None and 1 // 0 == 0

    with pytest.raises(ZeroDivisionError) as caught:
        optsched.solve(LONG, Walker(threads=2), stop=mine, time_limit=600)
    assert caught.value.result.schedule is not None  # type: ignore[attr-defined]
    assert threading.active_count() <= before


def test_a_warm_start_may_be_enough() -> None:
    """A criterion that the warm start meets: nothing is searched."""
    start = optsched.solve(TOY, "dispatch").schedule

    class Never(Walker):
        def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
            """Must not be called."""
            raise AssertionError("searched")

    for criterion in (FirstFeasible(), lambda progress: True):
        result = optsched.solve(LONG, Walker(), stop=FirstFeasible())
        again = optsched.solve(LONG, Never(), stop=criterion, warm_start=result.schedule)
        assert again.objective == result.objective
    assert optsched.solve(TOY, Never(), stop=Gap(0), warm_start=start).status == "optimal"
