"""Published methods by name. The docstring of each module defines the method, PRESET holds its choices, and CHOOSE_WHEN says
when to use it.

These modules contain no code. `build_method.py` maps the kinds in PRESET to classes. DiLoCo, for example, is a
`BlockingSchedule`, which calls `BlockSync.outer_step`, which in turn calls `Nesterov.step`.

A recipe's `sync` section overrides the PRESET of its method, and its `optim` section the method's OPTIM, if the method has one.
No other part of the package branches on the name of a method.
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
    """Return the keys of `optim` that a method chooses; empty for most methods."""
    return getattr(METHODS[method], "OPTIM", {})


def is_for_one_replica(method: str) -> bool:
    """Return whether a method is meant for a single replica, and so averages nothing."""
    return getattr(METHODS[method], "FOR_ONE_REPLICA", False)
