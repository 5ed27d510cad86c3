"""How deep the tests look: the profile that hypothesis runs under decides for all of them."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PROFILES = {"fast": 20, "ci": 60, "long": 500}
"""Examples of a property. `make test` runs under ``fast``, `make test-long` under ``long``."""

DEAR = 8
"""A property whose examples take a second each is tried this many times less."""

# a busy machine makes an example slow, and files of one example are overwritten by the next
_HARMLESS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

for name, examples in PROFILES.items():
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=name != "long",  # the long run looks elsewhere every time
        suppress_health_check=_HARMLESS,
    )


def few_examples(test: Any) -> Any:
    """As `given`'s tests with `DEAR` times fewer examples than the profile has."""
    return settings(max_examples=settings().max_examples // DEAR)(test)


def depth(n: int, most: int | None = None) -> int:
    """Half as many seeds or sizes under ``fast``; 1.5 times under ``ci``, 12.5 ``long``.

    `most` bounds what is dear, or is all there is.
    """
    wanted = max(1, n * settings().max_examples // 40)
    return wanted if most is None else min(wanted, most)


def seeds(
    n: int, most: int | None = None, also: Iterable[int] = ()
) -> Callable[[Callable[..., None]], Any]:
    """Run a test with `seed` = 0, 1, ... below `depth`; its failure says with which one.

    Seeds in `also`, which have found something once, run in every profile.
    """

    def loop(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(*given: Any, **named: Any) -> None:
            for seed in sorted({*range(depth(n, most)), *also}):
                try:
                    test(*given, seed=seed, **named)
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise

        own = inspect.signature(test)
        rest = [row for name, row in own.parameters.items() if name != "seed"]
        run.__signature__ = own.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return loop


def half(rows: Iterable[Any]) -> list[Any]:
    """Parameters of a test, every second one for the long run."""
    given = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=[pytest.mark.slow] * (k % 2)) for k, row in enumerate(given)]
