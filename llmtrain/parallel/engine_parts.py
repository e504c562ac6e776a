"""Parts from which engines are built."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config import OptimSection, ParallelSection
from llmtrain.model import LanguageModel, ReadWeight
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.wire_format import WireFormat


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Arguments of every engine. Each engine uses those that it needs."""

    model: LanguageModel
    """One replica of the model, on the meta device."""
    mesh: Mesh
    parallel: ParallelSection
    optim: OptimSection
    seed: int
    """Seed of random weights."""
    read: ReadWeight | None = None
    """Function that returns the weights to start from; None for random ones."""
    gradient_wire: WireFormat | None = None
    """Format to which gradients are rounded when they are averaged over replicas."""
    changes_in_forward: bool = False
    """True if hooks change the parameters of blocks during the forward pass."""
    sends_while_training: bool = False
    """True if messages between replicas are in flight during local steps."""
    lengths_vary: bool = False
    """True if micro-batches differ in length."""
