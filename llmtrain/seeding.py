"""Seeds that are derived from the recipe's seed by name, so that random numbers never depend on the order of calls."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on `seed` and `names` only, and is the same on every rank and machine."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
