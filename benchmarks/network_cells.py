"""Rows and cells of network.py, and the selection of a few cells that cover all pairs of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from loops import RECIPE
from table import ROOT

if TYPE_CHECKING:
    from llmtrain.config import SyncSection

STEPS = ("sync.warmup_steps=0", "sync.period.kind=steps")
METHODS = {
    "synchronous": ("sync.method=synchronous",),
    "local_sgd": ("sync.method=local_sgd", *STEPS),
    "diloco": ("sync.method=diloco", *STEPS),
    "edit": ("sync.method=edit", *STEPS),
    "edit_blocking": ("sync.method=edit", *STEPS, "sync.schedule=blocking"),
    "streaming_diloco": ("sync.method=streaming_diloco", *STEPS),
    "co2": ("sync.method=co2", *STEPS),
    "wagma": ("sync.method=wagma", *STEPS),
}
"""Overrides of each method, by its name in the table: the preset without warm-up."""
WIRES = ("fp32", "bf16", "int8", "int4")
CUSTOM = ": "
"""Separator between the name of a row given on the command line and its keys."""
Factors = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class Cell:
    """One measurement: a method with its wire format, the steps per round, and the network."""

    method: str
    wire: str
    every: int
    mbit: float
    latency_ms: float
    keys: tuple[str, ...] = ()
    """Overrides of a row given on the command line, in place of those of METHODS."""

    @property
    def network(self) -> tuple[float, float]:
        """Bandwidth and latency. Cells that have both in common are measured on the same hosts."""
        return self.mbit, self.latency_ms

    @property
    def overrides(self) -> list[str]:
        """Overrides of the recipe."""
        own = self.keys or METHODS[self.method]
        if "sync.method=synchronous" in own:
            rounded = [f"sync.wire.kind={self.wire}", "sync.wire.gradients=true"]
            return [*own, *(rounded if self.wire not in ("fp32", "") else [])]
        chosen = {key.partition("=")[0] for key in self.keys}
        every = [] if "sync.period.every" in chosen else [f"sync.period.every={self.every}"]
        wire = [] if self.keys else [f"sync.wire.kind={self.wire}"]
        return [*own, *every, *wire]

    def sync(self) -> SyncSection:
        """Return the recipe's `sync` section."""
        return _sync_of(tuple(self.overrides))


@cache
def _sync_of(overrides: tuple[str, ...]) -> SyncSection:
    from llmtrain.recipe_loader import load_recipe

    return load_recipe(ROOT / RECIPE, overrides).sync


def row_of(text: str) -> dict[str, object]:
    """Return the method, wire and keys that a row of the command line gives as `METHOD`, `METHOD/WIRE` or `NAME: KEY=VALUE ...`.
    Keys also choose the wire. Raises ValueError for any other text."""
    name, custom, keys = text.partition(CUSTOM)
    if custom:
        words = keys.split()
        if not words or not all("=" in word for word in words):
            raise ValueError(f"row {text!r}: expected 'NAME: KEY=VALUE ...'")
        own = [key for key in STEPS if "sync.method=synchronous" not in words]
        if any(word.startswith(("sync.period=", "sync.period.kind=")) for word in words):
            own.remove("sync.period.kind=steps")
        return {"method": name, "wire": "", "keys": (*own, *words)}
    method, _, wire = text.partition("/")
    if method not in METHODS or (wire or "fp32") not in WIRES:
        raise ValueError(
            f"row {text!r}: expected METHOD, METHOD/WIRE or 'NAME: KEY=VALUE ...', METHOD one of {', '.join(METHODS)} and "
            f"WIRE one of {', '.join(WIRES)}"
        )
    return {"method": method, "wire": wire or "fp32"}


def product(factors: Factors) -> list[dict[str, object]]:
    """Return all combinations of the factors' values, with the last factor changing fastest."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(
    candidates: Sequence[dict[str, object]], cost: Callable[[dict[str, object]], float]
) -> list[dict[str, object]]:
    """Return a few candidates that cover all pairs: any two values that a candidate has together, a chosen candidate has
    together, too. The search is greedy and deterministic. It repeatedly takes the candidate with the most new pairs, of equal
    ones the cheapest, and of these the first."""

    def pairs(one: dict[str, object]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
        return set(itertools.combinations(one.items(), 2))

    left = [(pairs(one), cost(one), one) for one in candidates]
    missing = set().union(*(found for found, _, _ in left))
    chosen = []
    while missing:
        found, _, best = max(left, key=lambda entry: (len(entry[0] & missing), -entry[1]))
        missing -= found
        chosen.append(best)
    return chosen
