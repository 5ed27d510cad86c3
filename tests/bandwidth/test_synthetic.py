"""Synthetic clusters: complete, reproducible, and as awkward as measured ones."""

from __future__ import annotations

import numpy as np
import pytest
from depth import seeds
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.prior import line_rate
from optsched.errors import InputError

SMALL = synthetic.KINDS[:4]


def test_seeds() -> None:
    """The same seed gives the same bits, another one other noise."""
    a, b, c = (synthetic.cluster(SMALL, 5, seed, levels={"leaf": 2}) for seed in (1, 1, 2))
    assert a == b and a.sha256 != c.sha256
    assert synthetic.network(a, 3) == synthetic.network(b, 3) != synthetic.network(a, 4)


@given(
    st.lists(st.sampled_from(SMALL), min_size=1, max_size=4),
    st.integers(1, 5),
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 9),
)
def test_clusters(kinds: list[str], hosts: int, parts: list[int], seed: int) -> None:
    """Hosts of the kinds in turn; levels of so many hosts; every pattern has a value once."""
    sizes = np.cumprod(parts, dtype=int).tolist()
    levels = {f"level-{i}": size for i, size in enumerate(sizes)}
    made = synthetic.cluster(kinds, hosts, seed, levels=levels)
    assert [host.type for host in made.hosts] == [kinds[h % len(kinds)] for h in range(hosts)]
    assert {kind.name for kind in made.types} == {host.type for host in made.hosts}
    assert made.levels == tuple(reversed(levels))
    for at, size in enumerate(reversed(sizes)):
        found = [len(domain) for domain in made.domains(at).values()]
        assert set(found[:-1]) <= {size} and sum(found) == hosts and found[-1] <= size
    table = synthetic.network(made, seed)
    wanted = set(_patterns(hosts, 8)) - {(1,)}
    assert {row.pattern for row in table} == wanted and len(table) == len(wanted)
    assert min(row.value for row in table) > 0
    best: dict[int, int] = {}
    for kind in made.types:
        assert kind.intra is not None
        for c in range(2, 9):
            best[c] = max(best.get(c, 0), int(kind.intra.by_count[c]))
    assert all(best[row.pattern[0]] == row.value for row in table if len(row.pattern) == 1)


def _patterns(hosts: int, most: int) -> list[tuple[int, ...]]:
    """All falling tuples of counts, but the empty one."""
    found: list[tuple[int, ...]] = []
    for c in range(1, most + 1):
        found.append((c,))
        if hosts > 1:
            found += [(c, *rest) for rest in _patterns(hosts - 1, c)]
    return found


@seeds(1, 4)
def test_network(seed: int) -> None:
    """Near the line rate, lower with a whole host, wrong for the compact, and not monotone."""
    made = synthetic.cluster("nvswitch", 4, seed)
    table = {row.pattern: row.value for row in synthetic.network(made, seed)}
    spoilt = (3, 3, 2)
    for pattern, value in table.items():
        if len(pattern) == 1 or pattern == spoilt:
            continue
        rate = float(line_rate(made, np.array([pattern]))[0])
        drop = synthetic.WHOLE_HOST_DROP if 8 in pattern else 1
        assert 0.8 * drop <= (value + 1) / rate and (value - 1) / rate <= 1.2 * drop
    on_two = [v for p, v in table.items() if len(p) == 2 and sum(p) == sum(spoilt)]
    assert table[spoilt] > max(on_two)
    falls = 0
    for pattern, value in table.items():  # one GPU more on a host that takes part
        for k in range(len(pattern) * (len(pattern) > 1)):
            more = tuple(sorted((*pattern[:k], pattern[k] + 1, *pattern[k + 1 :]), reverse=True))
            falls += more in table and table[more] < value
    assert falls > 100
    assert table[4, 4] > table[6, 2] > table[7, 1]


def test_refused() -> None:
    """Unknown kinds, levels that are not nested, and tables that are too large."""
    with pytest.raises(InputError, match=r"kind: expected one of nvswitch, .*, got 'h100'"):
        synthetic.cluster("h100", 2)
    with pytest.raises(InputError, match="kinds: expected one or more"):
        synthetic.cluster([], 2)
    with pytest.raises(InputError, match=r"hosts: expected an integer in 1\.\."):
        synthetic.cluster("pcie", 0)
    for levels in ({"leaf": 4, "spine": 6}, {"leaf": 4, "spine": 2}, {"leaf": 0}, {"leaf": "4"}):
        with pytest.raises(InputError, match=r"levels\[(leaf|spine)\]: expected"):
            synthetic.cluster("pcie", 8, levels=levels)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed"):
        synthetic.host_type("pcie", -1)
    with pytest.raises(InputError, match="patterns, a synthetic table holds 20000"):
        synthetic.network(synthetic.cluster("pcie", 16))
