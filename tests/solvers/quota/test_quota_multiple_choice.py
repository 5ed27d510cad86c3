"""Multiple choice: against brute force, a plain table of budgets, the linear relaxation."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth

from optsched.errors import InputError
from optsched_solvers.quota import multiple_choice
from optsched_solvers.quota.multiple_choice import choice, first_choice, options, relax, solve

Rows = list[list[tuple[int, int]]]
"""Options (size, value) of every row."""


def arrays(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same as `choice` takes it."""
    ptr = np.cumsum([0] + [len(row) for row in rows])
    flat = [option for row in rows for option in row]
    return ptr, np.array([s for s, _ in flat]), np.array([v for _, v in flat])


def worth(rows: Rows, sizes: np.ndarray) -> int:
    """Value of chosen sizes; each must be one of its row."""
    return sum(dict(row)[int(size)] for row, size in zip(rows, sizes, strict=True))


def chosen(rows: Rows, budget: int) -> np.ndarray:
    """Sizes without their certificate."""
    return choice(*arrays(rows), budget)[0]


def relaxed(rows: Rows, budget: int) -> tuple[int, int]:
    """The value of the first solution, and the bound of the linear relaxation."""
    checked = options(*arrays(rows), budget)
    found = relax(checked)
    first = int(checked.value[first_choice(checked, found)].sum())
    return checked.first_value + first, checked.first_value + found.promise // found.scale


def plain(rows: Rows, budget: int) -> int:
    """Best value by budget, row by row, options by size: no hull, no core, no reductions."""
    best: dict[int, int] = {0: 0}
    for row in rows:
        new: dict[int, int] = {}
        for used, total in best.items():
            for size, value in row:
                if used + size <= budget:
                    new[used + size] = max(new.get(used + size, total + value), total + value)
        best = new
    return max(best.values())


def random_rows(random: np.random.Generator, count: int, options: int, sizes: int) -> Rows:
    """Tables of seven kinds: any sign, ties, concave, convex, correlated, gangs, millionths."""
    rows: Rows = []
    kind = int(random.integers(7))
    for _ in range(count):
        k = int(random.integers(1, options + 1))
        size = np.sort(random.choice(sizes, min(k, sizes), replace=False))
        if kind == 0:
            value = random.integers(-5, 6, len(size))
        elif kind == 1:
            value = np.sort(random.integers(0, 4, len(size)))
        elif kind == 2:
            value = (10**6 * np.log1p(size) * random.uniform(0.1, 3)).astype(int)
        elif kind == 3:
            value = size * size * random.integers(1, 4)
        elif kind == 4:
            value = 3 * size + random.integers(0, 3, len(size))
        elif kind == 5:
            least = int(random.integers(2, 5))
            size = np.concatenate(([0], np.arange(least, least + k)))
            value = (100 * np.sqrt(size) * random.uniform(0.5, 2)).astype(int)
        else:
            value = random.integers(-(10**6), 10**6, len(size))
        rows.append([(int(s), int(v)) for s, v in zip(size, value, strict=True)])
    return rows


def budgets(rows: Rows, random: np.random.Generator) -> int:
    """From the least that is feasible to a little more than all."""
    least, most = sum(row[0][0] for row in rows), sum(row[-1][0] for row in rows)
    return int(random.integers(least, most + 3))


def test_equals_plain_table_on_thousands() -> None:
    """Every kind of table, many budgets; bound above, greedy feasible, certificate holds."""
    random = np.random.default_rng(5)
    met, cases = 0, depth(2000, 10_000)
    for _ in range(cases):
        rows = random_rows(random, int(random.integers(1, 9)), 6, 13)
        budget = budgets(rows, random)
        best = plain(rows, budget)
        sizes, proof = choice(*arrays(rows), budget)
        assert sizes.sum() <= budget
        assert worth(rows, sizes) == best == proof.value
        assert proof.holds
        first, bound = relaxed(rows, budget)
        assert first <= best <= bound
        met += first == best
    assert met > 0.6 * cases  # greedy is no toy


def test_hard_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for a proof, the error carries a feasible choice and a true bound."""
    monkeypatch.setattr(multiple_choice, "STATES", 2)
    random = np.random.default_rng(3)
    hard = 0
    for _ in range(100):
        rows = random_rows(random, 8, 6, 13)
        budget = budgets(rows, random)
        best = plain(rows, budget)
        given_rows = options(*arrays(rows), budget)
        solved = solve(given_rows)
        sizes = given_rows.first_size + given_rows.size[solved.position]
        hard += worth(rows, given_rows.first_size + given_rows.size[solved.position]) < solved.bound
        assert sizes.sum() <= budget
        assert worth(rows, sizes) <= best <= solved.bound
    assert hard > 10


def _large(kind: str, rows: int, seed: int) -> Rows:
    """Ten options a row that are hard for bounds: values along with sizes, or all sizes alike."""
    random = np.random.default_rng(seed)
    made: Rows = []
    for _ in range(rows):
        size = np.sort(random.choice(np.arange(1, 60), 10, replace=False))
        if kind == "strong":
            value = size + 10
        elif kind == "subset":
            size, value = 2 * size, 2 * size
        elif kind == "weak":
            value = size + random.integers(0, 8, 10)
        elif kind == "equal":
            size = 7 * np.arange(1, 11)
            value = np.sort(random.integers(0, 100, 10))
        else:
            value = np.sort(random.integers(0, 10**9, 10))
        pairs = zip(size.tolist(), value.tolist(), strict=True)
        made.append([(0, 0), *((int(s), int(v)) for s, v in pairs)])
    return made


@pytest.mark.parametrize("kind", ["strong", "subset", "weak", "equal", "any"])
@pytest.mark.parametrize("share", [0.1, 0.93])
def test_large_adversarial(kind: str, share: float) -> None:
    """Some hundred rows whose values follow their sizes, against the plain table in numpy."""
    rows = _large(kind, 120, 7)
    budget = int(share * sum(row[-1][0] for row in rows)) | 1
    best = np.zeros(budget + 1, np.int64)
    for row in rows:
        new = best.copy()
        for size, value in row[1:]:
            if size <= budget:
                new[size:] = np.maximum(new[size:], best[: budget + 1 - size] + value)
        best = new
    assert worth(rows, chosen(rows, budget)) == best[budget]


def test_smaller_of_equals() -> None:
    """GPUs that add nothing are not taken."""
    assert choice([0, 3], [1, 2, 4], [5, 5, 5], 9)[0].tolist() == [1]
    assert choice([0, 2], [0, 3], [0, -1], 9)[0].tolist() == [0]


def test_huge_numbers_stay_exact() -> None:
    """Values near the limit: one unit decides, and no product overflows."""
    top = 2**56
    rows = [[(0, 0), (2**30, top + 1), (2**31 - 1, 2 * top)], [(0, 0), (2**30, top)]]
    assert chosen(rows, 2**31).tolist() == [2**30, 2**30]
    assert chosen(rows, 2**31 - 1).tolist() == [2**31 - 1, 0]
    over = relaxed(rows, 2**31)[1] - 2 * top - 2**26  # one unit of the second row
    assert 0 <= over <= 2**31  # prices are whole numbers here


@pytest.mark.parametrize(
    ("ptr", "size", "value", "budget", "said"),
    [
        (
            [0, 2, 4],
            [1, 2, 2, 3],
            [0, 0, 0, 0],
            2,
            "need 3 GPUs of a budget of 2 .job 1: 2, job 0: 1",
        ),
        ([0, 1, 1], [3], [0], 9, "row 1 is empty"),
        ([0, 2, 1, 3], [1, 2, 3], [0] * 3, 9, "ptr: row 1 ends at 1, before it begins"),
        ([0, 1], [-3], [0], 9, r"row 0, option 0 \(-3\) is not in 0\.\.2147483647"),
        ([0, 1], [1], [2**60], 9, "beyond 2.58"),
        ([0, 1, 2, 3], [1, 1, 1], [2**58] * 3, 9, "the sum up to row 1 is beyond"),
        ([0, 1], [1], [float("nan")], 9, "value: expected whole numbers"),
        ([0, 1], [True], [0], 9, "truth value"),
        ([0, 1], [1], [0], -1, "budget: expected an integer"),
    ],
)
def test_refusals(ptr: object, size: object, value: object, budget: object, said: str) -> None:
    """Every wrong input is one sentence that names the place."""
    with pytest.raises(InputError, match=said):
        choice(ptr, size, value, budget)  # type: ignore[arg-type]


def test_certificate_of_a_wrong_answer() -> None:
    """Anything but an optimum within the budget does not hold."""
    random = np.random.default_rng(6)
    worse = beyond = 0
    for _ in range(500):
        rows = random_rows(random, 5, 6, 13)
        budget = budgets(rows, random)
        best = plain(rows, budget)
        sizes, proof = choice(*arrays(rows), budget)
        sizes[:] = [row[int(random.integers(len(row)))][0] for row in rows]
        total = worth(rows, sizes)
        assert proof.holds == (sizes.sum() <= budget and total == best)
        worse += sizes.sum() <= budget and total < best
        beyond += sizes.sum() > budget and total > best
    assert worse > 50
    assert beyond > 20
