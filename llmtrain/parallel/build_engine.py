"""The engine that a recipe names."""

from __future__ import annotations

from llmtrain.config import OptimSection, ParallelSection
from llmtrain.model import LanguageModel
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import Fsdp2Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.wire_format import WireFormat


def build_engine(
    model: LanguageModel,
    mesh: Mesh,
    parallel: ParallelSection,
    optim: OptimSection,
    *,
    seed: int,
    gradient_wire: WireFormat | None = None,
    changes_in_forward: bool = False,
) -> Engine:
    """One replica of `model`, which is on the meta device. A collective of all ranks.

    `gradient_wire` rounds averaged gradients; `changes_in_forward` says that hooks will change blocks in forward.
    Raises RecipeError when a library that it needs is not there.
    """
    if parallel.engine == "fsdp2":
        return Fsdp2Engine(model, mesh, parallel, optim, seed, gradient_wire)
    from llmtrain.parallel.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(model, mesh, parallel, optim, seed, gradient_wire, changes_in_forward)


def replica_backend(parallel: ParallelSection) -> str:
    """What carries traffic between replicas: masters that rest in CPU memory are sent from there."""
    return "gloo" if parallel.zero_offload and parallel.replica_backend == "auto" else parallel.replica_backend
