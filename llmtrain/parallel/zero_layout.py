"""DeepSpeed's configuration, its layout of parameters in flat tensors, and conversion to and from full parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config import ParallelSection
from llmtrain.config.section import merge
from llmtrain.parallel.mesh import Mesh


@dataclass(frozen=True)
class FlatGroup:
    """Parameter group that is divided among the ranks of a shard group, with one flat tensor of `size` elements per rank.

    ZeRO-3 (`by_parameter`) cuts each parameter into `ranks` equal parts, and a rank's tensor holds the rank's parts end
    to end. ZeRO-1 and 2 put all parameters end to end and cut the result into equal parts. Padding fills the last parts.
    """

    names: list[str]
    shapes: list[torch.Size]
    ranks: int
    size: int
    by_parameter: bool

    def __post_init__(self) -> None:
        total = sum(math.prod(shape) for shape in self.shapes)
        fits = self.size == sum(self._widths()) if self.by_parameter else self.size * self.ranks >= total
        assert fits, (self.names, self.size, self.ranks)

    def full_tensors(self, gathered: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the full parameters by name, given all ranks' tensors [ranks, size]."""
        if self.by_parameter:
            parts = gathered.split(self._widths(), dim=1)
        else:
            numels = [math.prod(shape) for shape in self.shapes]
            flat = gathered.reshape(-1)
            parts = flat[: sum(numels)].split(numels)
        return {
            name: part.reshape(-1)[: math.prod(shape)].view(shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def part(self, full: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor:
        """Return a rank's tensor [size], cut from full parameters and padded with zeros."""
        flats = [full[name].reshape(-1) for name in self.names]
        if not self.by_parameter:
            flat = torch.cat(flats)
            return _padded(flat[rank * self.size : (rank + 1) * self.size], self.size)
        parts = zip(flats, self._widths(), strict=True)
        return torch.cat([_padded(flat[rank * width : (rank + 1) * width], width) for flat, width in parts])

    def padding(self, rank: int) -> Iterator[slice]:
        """Yield the slices of a rank's tensor that are padding. Some may be empty."""
        start = 0
        numels = [math.prod(shape) for shape in self.shapes]
        parts = zip(numels, self._widths(), strict=True) if self.by_parameter else [(sum(numels), self.size)]
        for numel, width in parts:
            used = min(max(numel - rank * width, 0), width)
            yield slice(start + used, start + width)
            start += width

    def _widths(self) -> list[int]:
        """Return the number of elements that each parameter has in a rank's tensor under ZeRO-3."""
        return [math.ceil(math.prod(shape) / self.ranks) for shape in self.shapes]


def _padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


class ShardAxis:
    """Model-parallel unit (`mpu`), from which DeepSpeed takes its groups: data parallelism over the shard axis, and no model
    parallelism."""

    def __init__(self, mesh: Mesh):
        self._group = mesh.shard_mesh.get_group("shard")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


BUCKET = 50_000_000
"""Number of gradient values that DeepSpeed reduces together. DeepSpeed allocates buffers for these in advance, and its default is
ten times larger."""
PREFETCHED = 50_000_000
"""Number of parameter values that DeepSpeed's stage 3 gathers ahead of their use, at each layer."""
LIVE = 2 * PREFETCHED
"""Number of gathered parameter values above which nothing more is gathered ahead; DeepSpeed's default is ten times larger."""


def deepspeed_config(parallel: ParallelSection, changes_in_forward: bool, sends_while_training: bool) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`. Keys in `parallel.deepspeed` override it.

    The batch sizes in it have no effect, because `ZeroEngine` marks the last micro-batch of a step itself and divides the loss
    by the number of tokens.
    """
    # In stages 1 and 2, DeepSpeed overlaps reductions with backward, and then waits for the whole device, including messages
    # between replicas, which would no longer overlap with training.
    overlaps = parallel.zero_stage == 3 or not sends_while_training
    zero: dict[str, Any] = {"stage": parallel.zero_stage, "overlap_comm": overlaps, "contiguous_gradients": True}
    zero |= {"reduce_bucket_size": BUCKET}
    if parallel.zero_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif parallel.zero_stage < 3:
        # The engine has clipped already. DeepSpeed would all-reduce the norm of each parameter group, and then make the
        # host read it.
        zero["compute_grad_norm"] = False
    if parallel.zero_stage == 3:
        # No parameter may stay gathered across a synchronization, because it would keep its old values.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        zero |= {"sub_group_size": 2**62}  # keeps each parameter group in one flat tensor
        # DeepSpeed's own linear layer adds the bias in place. Selective checkpointing keeps the matrix product, and the
        # recomputation would add the bias to it a second time.
        zero |= {"memory_efficient_linear": False}
        zero |= {"stage3_prefetch_bucket_size": 0 if changes_in_forward else PREFETCHED}
        zero |= {"stage3_max_live_parameters": LIVE}
    # In stage 1 with bf16, fp32 here would make DeepSpeed use another optimizer, which does not shard gradients.
    accumulates_in = "bf16" if (parallel.zero_stage, parallel.precision) == (1, "bf16") else "fp32"
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # A norm that is not finite ends the run before a checkpoint. DeepSpeed's own check would read every gradient in every step.
        "bf16": {"enabled": parallel.precision == "bf16", "check_grad_overflow": False},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": accumulates_in},
        # DeepSpeed's timer would wait for the whole device in every micro-batch, messages between replicas included.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": zero,
    }
    return merge(own, parallel.deepspeed)
