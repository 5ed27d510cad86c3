"""How deep the tests look: the profile that hypothesis runs under decides for all of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

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
