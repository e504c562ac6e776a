"""Values that all processes of a run must have in common: its recipe, and the versions of the code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import llmtrain
from llmtrain.config import Recipe
from llmtrain.config.section import leaves

PER_HOST_KEYS = (
    "run.out_dir",
    "data.cache_dir",
    "data.num_proc",
    "parallel.replica_network",
    "parallel.shard_network",
    "eval.suite.data_dir",
)
"""Keys that may differ between hosts: folders, interfaces and a number of processes. Tokens are compared separately."""
MAX_NAMED = 5
"""Maximum number of values that `inconsistency` names."""


def common_values(recipe: Recipe) -> dict[str, str]:
    """Return the versions of the code and the values of the recipe's keys, as JSON, that must be the same in all processes."""
    import torch  # not above, because launchers print a line before they import it

    # Builds of one version for other GPUs (2.13.0+cu126) compute the same.
    versions = {
        "llmtrain": f"{llmtrain.__version__} (source {source_hash()})",
        "torch": torch.__version__.partition("+")[0],
    }
    return {**versions, **recipe_values(recipe)}


def recipe_values(recipe: Recipe) -> dict[str, str]:
    """Return the value of each key of the recipe as JSON, without PER_HOST_KEYS."""
    values = leaves(recipe.model_dump(mode="json"))
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items() if key not in PER_HOST_KEYS}


def digest_of_values(values: Mapping[str, str]) -> str:
    """Return a digest of values, which does not depend on their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def inconsistency(values: Sequence[Mapping[str, str]], who: Callable[[list[int]], str]) -> str | None:
    """Return text such as `optim.lr is 0.001 for rank 0, 0.002 for ranks 1-3`, or None if all have the same values.
    `who` returns a text that names the members of `values` with the given indices."""
    found = []
    for key in dict.fromkeys(key for one in values for key in one):
        holders: dict[str, list[int]] = {}
        for index, one in enumerate(values):
            holders.setdefault(one.get(key, "not given"), []).append(index)
        if len(holders) > 1:
            found.append(f"{key} is " + ", ".join(f"{value} for {who(indices)}" for value, indices in holders.items()))
    more = [f"and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    return "; ".join([*found[:MAX_NAMED], *more]) or None


@cache  # ranks that a launcher forks inherit it
def source_hash() -> str:
    """Return a digest of the package's Python files, which distinguishes checkouts of the same version."""
    root = Path(llmtrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
