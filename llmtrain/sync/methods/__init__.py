"""The published methods by name: each module's docstring is the method, its PRESET the choices it makes.

A preset is what a recipe's `sync` section is laid over; nothing else in the package knows a method's name.
"""

from __future__ import annotations

from types import ModuleType

from llmtrain.sync.methods import (
    a_edit,
    co2,
    diloco,
    edit,
    local_sgd,
    palsgd,
    post_local_sgd,
    qsr,
    slowmo,
    streaming_diloco,
    synchronous,
    wagma,
)

METHODS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        synchronous,
        local_sgd,
        post_local_sgd,
        qsr,
        slowmo,
        diloco,
        streaming_diloco,
        co2,
        palsgd,
        wagma,
        edit,
        a_edit,
    )
}
