"""The tests of the verifier notice small faults in it; ``python tests/mutants.py`` tries all."""

from __future__ import annotations

import pytest
from mutants import mutants, noticed, original

pytestmark = pytest.mark.slow


def test_without_a_fault() -> None:
    """They pass: what fails with a mutant is the fault."""
    first = next(mutants())
    assert not noticed(first._replace(tree=original(first.module)))


@pytest.mark.parametrize("part", range(10))
def test_mutants_are_noticed(part: int) -> None:
    """A tenth of them."""
    alive = [str(mutant) for mutant in list(mutants())[part::10] if not noticed(mutant)]
    assert not alive
