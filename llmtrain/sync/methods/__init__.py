"""The published methods by name: each module's docstring is the method, its PRESET the choices it makes.

A preset is what a recipe's `sync` section is laid over; nothing else in the package knows a method's name.
"""

from __future__ import annotations

from types import ModuleType

from llmtrain.sync.methods import diloco, edit, local_sgd, qsr, synchronous

METHODS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in (synchronous, local_sgd, qsr, diloco, edit)
}
