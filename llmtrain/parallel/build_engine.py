"""Construction of the engine that a recipe's `parallel` section chooses."""

from __future__ import annotations

from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.fsdp import Fsdp2Engine
from llmtrain.parallel.single_device import SingleDeviceEngine


def build_engine(parts: EngineParts) -> Engine:
    """Build the engine for one replica. A collective of all ranks. Raises RecipeError if a required library is missing."""
    if parts.parallel.engine == "fsdp2":
        engine_class = Fsdp2Engine if parts.mesh.shard_comms.size > 1 else SingleDeviceEngine
        return engine_class(parts)
    from llmtrain.parallel.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(parts)
