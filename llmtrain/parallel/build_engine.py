"""Construction of the engine from a recipe's sections."""

from __future__ import annotations

from llmtrain.config import OptimSection, ParallelSection
from llmtrain.model import LanguageModel, ReadWeight
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import Fsdp2Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.single_device import SingleDeviceEngine
from llmtrain.parallel.wire_format import WireFormat


def build_engine(
    model: LanguageModel,
    mesh: Mesh,
    parallel: ParallelSection,
    optim: OptimSection,
    *,
    seed: int,
    read: ReadWeight | None = None,
    gradient_wire: WireFormat | None = None,
    changes_in_forward: bool = False,
    lengths_vary: bool = False,
) -> Engine:
    """Build the engine for one replica of `model`, which is on the meta device. A collective of all ranks.

    Weights are those that `read` returns, or random ones derived from `seed`. `gradient_wire` is the format to which gradients
    are rounded when they are averaged over replicas. `changes_in_forward` means that hooks change blocks during forward,
    `lengths_vary` that micro-batches differ in length. Raises RecipeError if a required library is missing.
    """
    if parallel.engine == "fsdp2":
        of_torch = Fsdp2Engine if mesh.shard_comms.size > 1 else SingleDeviceEngine
        return of_torch(model, mesh, parallel, optim, seed, read, gradient_wire, lengths_vary)
    from llmtrain.parallel.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(model, mesh, parallel, optim, seed, read, gradient_wire, changes_in_forward, lengths_vary)
