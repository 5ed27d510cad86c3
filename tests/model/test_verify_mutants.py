"""The tests of the verifier notice small faults in it; ``python tests/mutants.py`` tries all."""

from __future__ import annotations

import pytest
from mutants import mutants, noticed


@pytest.mark.parametrize("part", [pytest.param(k, marks=pytest.mark.slow) for k in range(10)])
def test_mutants_are_noticed(part: int) -> None:
    """A tenth of them."""
    alive = [str(mutant) for mutant in list(mutants())[part::10] if not noticed(mutant)]
    assert not alive
