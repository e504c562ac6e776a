"""Published methods by name. The docstring of each module defines the method, PRESET holds its choices, and CHOOSE_WHEN says
when to use it.

These modules have no code. `build_method.py` has the classes that PRESET names by their kinds: DiLoCo, for example, is
`BlockingSchedule`, which calls `BlockSync.outer_step` and that `Nesterov.step`.

A recipe's `sync` section overrides the PRESET of its method. Its `optim` section overrides the method's OPTIM, if the
method has one. No other part of the package branches on the name of a method.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

METHODS: dict[str, ModuleType] = {
    name: import_module(f"{__name__}.{name}")
    for name in (
        "synchronous",
        "local_sgd",
        "post_local_sgd",
        "qsr",
        "des_loc",
        "slowmo",
        "diloco",
        "muloco",
        "sparseloco",
        "streaming_diloco",
        "co2",
        "palsgd",
        "wagma",
        "edit",
        "a_edit",
        "snoo",
        "gpa",
    )
}


def inner_preset(method: str) -> dict[str, Any]:
    """Return the keys of `optim` that a method chooses; most choose none."""
    return getattr(METHODS[method], "OPTIM", {})


def is_for_one_replica(method: str) -> bool:
    """Return whether a method is meant for a single replica, so that it has nothing to average."""
    return getattr(METHODS[method], "FOR_ONE_REPLICA", False)
