"""How deep the tests look: the profile that hypothesis runs under decides for all of them."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable

PROFILES = {"fast": 20, "ci": 60, "long": 500}
"""Examples of a property. `make test` runs under ``fast``, `make test-long` under ``long``."""

# a busy machine makes an example slow, which is no defect
for name, examples in PROFILES.items():
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def depth(fast: int, most: int | None = None) -> int:
    """So many examples, seeds or sizes under ``fast``; 3 times as many under ``ci``, 25 ``long``.

    `most` bounds what is dear, or is all there is.
    """
    wanted = fast * settings().max_examples // PROFILES["fast"]
    return wanted if most is None else min(wanted, most)


def seeds(fast: int, most: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """Run a test with `seed` = 0, 1, ... below `depth`; its failure says with which one."""

    def loop(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(*given: Any, **named: Any) -> None:
            for seed in range(depth(fast, most)):
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
