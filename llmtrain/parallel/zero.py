"""DeepSpeed ZeRO engine: stage 1, 2 or 3 over the shard axis.

An `mpu` object limits DeepSpeed's data parallelism to the shard group. The parameters of a block form one or two of the
optimizer's parameter groups: one with weight decay and one without. A rank's part of the block's fp32 master weights is
therefore one or two flat tensors, which synchronization changes in place. Between backward and step, this module
averages gradients over the replicas and clips them. DeepSpeed does the rest.

In bf16, randomly initialized masters have values that are rounded to bf16, because DeepSpeed copies them from the bf16 weights.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from llmtrain.errors import RecipeError
from llmtrain.loss import inputs_and_labels
from llmtrain.model import PREFIX, ModelBlock, ReadWeight, blocks_of, initialize
from llmtrain.parallel.collectives import PendingCollective, results_in_order
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.parallel.engine import Block, Engine, Keep, MicroBatch, as_is, count_positions, gradient_norm
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.optimizers import build_optimizer, decay_groups, moments_of, start_moments
from llmtrain.parallel.wrapping import COMPUTE, named_parameters_of, wrap_layers
from llmtrain.parallel.zero_layout import FlatGroup, ShardAxis, deepspeed_config

# Without this variable, DeepSpeed guesses the accelerator and logs its guess.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
# torch warns at every call that it has renamed these functions, and DeepSpeed calls both in every step.
warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)
try:
    import deepspeed
    from deepspeed.utils import safe_get_local_fp32_param
except ImportError as error:
    raise RecipeError(
        f"parallel.engine=zero needs DeepSpeed, which can't be imported ({error}); install it with: "
        "pip install -c constraints.txt -e '.[zero]'"
    ) from error
# DeepSpeed's engine would import this later, and 500 modules with it. Imported here, it is shared by all forked ranks.
with suppress(ImportError):
    import deepspeed.runtime.zero.muon.muon_optimizer

# Disable shared-memory reductions, which only inference uses. DeepSpeed would compile them at the first start on a
# machine, and a start that is killed during compilation leaves a lock that blocks all later starts forever. GPUs do
# not have this operation, and there the mere access to the table would try all compilers.
if os.environ["DS_ACCELERATOR"] == "cpu":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class ZeroEngine(Engine):
    """Engine for one replica under DeepSpeed ZeRO. See `Engine` for the methods.

    The compute weights, in the compute dtype, follow the masters. In stage 3 they do so block by block. In stages 1 and 2,
    every rank computes with full weights that are gathered all at once, so the block hooks run for all blocks at the
    start of a step, before its first forward.
    """

    returns_copies = True

    def __init__(self, parts: EngineParts):
        """Build the engine. With `changes_in_forward`, no block may be gathered before the hooks of its forward have run, so
        stage 3 prefetches nothing."""
        self.model, self.mesh = model, mesh = parts.model, parts.mesh
        parallel, optim = parts.parallel, parts.optim
        self.stage = parallel.zero_stage
        self.gradient_wait = DeviceTimer(mesh.device)
        self._is_offloaded = parallel.zero_offload
        self._clip_norm, self._gradient_wire = optim.clip_norm, parts.gradient_wire
        self._hooks: list[Callable[[int], None]] = []
        self._in_forward = False
        self._masters_changed = False  # True while the compute weights may lag behind changed masters
        # DeepSpeed requires LOCAL_RANK and uses it as the GPU's index. srun does not set it, and with one GPU per task,
        # GPU 0 is every rank's GPU.
        number = mesh.world.local_rank if mesh.device.index is None else mesh.device.index
        os.environ["LOCAL_RANK"] = str(number)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints on every rank what it has compiled
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        config = deepspeed_config(parallel, parts.changes_in_forward, parts.sends_while_training)
        model_blocks = blocks_of(model)
        wrap_layers(model_blocks, parallel, parts.lengths_vary)
        grouped = self._build_weights(model_blocks, config, parts)
        self.optimizer = build_optimizer([group for groups in grouped for group in groups], optim)
        self._parameters = [[group["params"] for group in groups] for groups in grouped]  # DeepSpeed changes its lists
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config, mpu=ShardAxis(mesh), dist_init_required=False
        )
        names, masters = {id(p): name for name, p in model.named_parameters()}, iter(self._flat_masters())
        self.blocks, self._layout, self._masters = [], [], []
        for block, groups in zip(model_blocks, self._parameters, strict=True):
            mine = [next(masters) for _ in groups]
            layout = [
                FlatGroup(
                    [names[id(p)] for p in group],
                    [_shape(p) for p in group],
                    mesh.shard_comms.size,
                    master.numel(),
                    by_parameter=self.stage == 3,
                )
                for group, master in zip(groups, mine, strict=True)
            ]
            self._masters.append(mine)
            self._layout.append(layout)
            all_names = [name for group in layout for name in group.names]
            self.blocks.append(Block(block.name, [master.detach() for master in mine], all_names))
        if self.stage == 3:
            for index, block in enumerate(model_blocks):  # prepended: DeepSpeed's own hook gathers the block
                block.modules[0].register_forward_pre_hook(self._run_hooks(index), prepend=True)
        self._clear_padding()
        if parts.read is not None and parallel.precision == "bf16":
            self._read_masters(parts.read)
        start_moments(self.optimizer, (master for masters in self._masters for master in masters))

    # -- the interface -------------------------------------------------------------------------------------------

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        self._hooks.append(hook)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], replica_tokens: float | None = None
    ) -> torch.Tensor:
        ranks = self.mesh.shard_comms.size
        tokens = count_positions(micro_batches) if replica_tokens is None else replica_tokens / ranks
        total = torch.zeros((), device=self.mesh.device)
        if self.stage < 3:
            for index in range(len(self.blocks)):
                self._call_hooks(index)
        self._refresh_compute_weights()
        for number, batch in enumerate(micro_batches, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            batch = batch.to(self.mesh.device, non_blocking=True)
            self._in_forward = True
            loss = self._engine(*inputs_and_labels(batch))
            self._in_forward = False
            # DeepSpeed averages over the shard group, so each rank divides by an equal share of the replica's tokens.
            self._engine.backward(loss / tokens, scale_wrt_gas=False)
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        if self._is_offloaded and self.mesh.device.type == "cuda":
            torch.cuda.synchronize()  # DeepSpeed copies gradients to the CPU on streams of its own
        groups = self._gradients()
        averages = self.average_gradients and self.mesh.replicas > 1
        if averages:
            self._average_over_replicas(groups)
        gradients = [gradient for group in groups for gradient in group]
        norm = gradient_norm(gradients, self.mesh.shard_comms, exact=averages)
        if self._clip_norm is not None:
            factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self.stage == 3:  # the next gather reads what the optimizer writes
            self._masters_changed = True
        return norm

    def parameters_changed(self, block: Block) -> None:
        self._masters_changed = True
        if self.stage == 3:
            for parameter in (p for group in self._parameters[self.blocks.index(block)] for p in group):
                parameter.ds_tensor.copy_(safe_get_local_fp32_param(parameter))
            if self._in_forward:
                self._refresh_compute_weights()

    def moments(self, index: int, order: int) -> list[torch.Tensor | None]:
        return moments_of(self.optimizer.state, self._masters[index], order)

    @contextmanager
    def eval_mode(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        def summed_loss(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            device = self.mesh.device
            return self._engine(input_ids.to(device, non_blocking=True), labels.to(device, non_blocking=True))

        self._refresh_compute_weights()
        self._engine.eval()
        try:
            with torch.no_grad():
                yield summed_loss
        finally:
            if self.stage == 3:  # without a backward pass, DeepSpeed keeps what it has gathered for one
                self._engine.optimizer.parameter_offload.partition_all_parameters()
            self._engine.train()

    def state_dict(self, keep: Keep = as_is) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for layout, masters in zip(self._layout, self._masters, strict=True):
            for group, master in zip(layout, masters, strict=True):
                state |= {f"weights.{name}": keep(value) for name, value in self._dtensors_of(group, master).items()}
                for key, value in self.optimizer.state.get(master, {}).items():
                    is_count = value.ndim == 0  # the step count: one tensor for all parameters
                    named = {n: value.clone() for n in group.names} if is_count else self._dtensors_of(group, value)
                    state |= {f"optimizer.{name}.{key}": keep(part) for name, part in named.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for block, layout, masters in zip(self.blocks, self._layout, self._masters, strict=True):
            for group, master in zip(layout, masters, strict=True):
                master.copy_(self._part(group, state, "weights.{}"))
                prefix = f"optimizer.{group.names[0]}."
                keys = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
                self.optimizer.state[master] = {
                    key: state[prefix + key].clone()
                    if state[prefix + key].ndim == 0
                    else self._part(group, state, f"optimizer.{{}}.{key}").to(master.device)
                    for key in keys
                }
            self.parameters_changed(block)

    def to_dtensors(self, block: Block, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        layout = self._layout[self.blocks.index(block)]
        parts = flat.split([group.size for group in layout])
        named = [self._dtensors_of(group, part) for group, part in zip(layout, parts, strict=True)]
        return {name: value for group in named for name, value in group.items()}

    def from_dtensors(self, block: Block, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        layout = self._layout[self.blocks.index(block)]
        return torch.cat([self._part(group, named, "{}") for group in layout])

    @torch.no_grad()
    def full_weights(self) -> dict[str, torch.Tensor]:
        weights = {}
        for block, layout in zip(self.blocks, self._layout, strict=True):
            for group, master in zip(layout, block.shards, strict=True):
                whole = group.full_tensors(self._gathered(master))
                if self.mesh.shard_comms.rank == 0:
                    weights |= {name.removeprefix(PREFIX): value.cpu() for name, value in whole.items()}
        return weights

    # -- inside --------------------------------------------------------------------------------------------------

    def _build_weights(self, blocks: list[ModelBlock], config: dict[str, Any], parts: EngineParts) -> list[list[dict]]:
        """Initialize the weights and return the optimizer's groups by block. In stage 3, a rank never has more than one
        full block in memory in addition to its shards."""
        grouped, dtype = [], COMPUTE[parts.parallel.precision]
        for block in blocks:
            initialize(self.model, block, parts.seed, self.mesh.device, dtype, parts.read)
            parameters = [p for _, p in named_parameters_of(self.model, block)]
            grouped.append(decay_groups(parameters, parts.optim.weight_decay))
            if self.stage != 3:
                continue
            for module in block.modules:
                deepspeed.zero.Init(
                    module=module,
                    data_parallel_group=self.mesh.shard_mesh.get_group("shard"),
                    mem_efficient_linear=False,
                    config_dict_or_path=config,
                    dtype=dtype,
                )
        if self.stage == 3:
            for buffer in self.model.buffers():  # DeepSpeed moves them only in the other stages
                buffer.data = buffer.data.to(self.mesh.device)
        return grouped

    def _flat_masters(self) -> list[torch.Tensor]:
        """Return this rank's part of the fp32 masters, one flat tensor per optimizer group."""
        if self.stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [group["params"][0] for group in self._engine.optimizer.param_groups]

    @torch.no_grad()
    def _read_masters(self, read: ReadWeight) -> None:
        """Replace the masters, which DeepSpeed has copied from bf16 weights, by the fp32 weights that `read` returns."""
        for block, layout in zip(self.blocks, self._layout, strict=True):
            for group, master in zip(layout, block.shards, strict=True):
                full = {name: read(name.removeprefix(PREFIX)) for name in group.names}
                master.copy_(group.part(full, self.mesh.shard_comms.rank))
            self.parameters_changed(block)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Set the padding of the masters to zero. DeepSpeed leaves it uninitialized, but norms and messages include it."""
        for block, layout in zip(self.blocks, self._layout, strict=True):
            for group, master in zip(layout, block.shards, strict=True):
                for padding in group.padding(self.mesh.shard_comms.rank):
                    master[padding] = 0
            self.parameters_changed(block)

    def _gradients(self) -> list[list[torch.Tensor]]:
        """Return this rank's part of the gradients by optimizer group: the tensors that the optimizer's step will read."""
        if self._is_offloaded:
            return [[master.grad] for masters in self._masters for master in masters]
        return list(self._engine.optimizer.averaged_gradients.values())

    def _average_over_replicas(self, groups: list[list[torch.Tensor]]) -> None:
        """Average gradients over the replicas, with few groups in flight, so that the gradients are never copied all at once."""
        comms = self.mesh.replica_comms

        def started() -> Iterator[tuple[list[torch.Tensor], PendingCollective]]:
            for gradients in groups:
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).float()
                yield gradients, comms.start_all_reduce(flat, "averaging gradients", self._gradient_wire)

        with self.time_gradient_wait():
            for gradients, total in results_in_order(started()):
                parts = total.div_(comms.size).split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))

    def _run_hooks(self, index: int) -> Callable[[nn.Module, tuple], None]:
        def run(module: nn.Module, inputs: tuple) -> None:
            if self._in_forward:
                self._call_hooks(index)

        return run

    def _call_hooks(self, index: int) -> None:
        for hook in self._hooks:
            hook(index)

    def _refresh_compute_weights(self) -> None:
        """Bring the compute weights up to date with changed masters."""
        if self._masters_changed and self.stage < 3:
            self._engine.optimizer.update_lp_params()
        elif self._masters_changed and self.mesh.device.type == "cuda":
            # DeepSpeed gathers on its own stream, which would not wait for copies pending on this one.
            torch.cuda.current_stream().synchronize()
        self._masters_changed = False

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts of a group's flat tensor: [ranks, size]. A collective of the shard group."""
        return self.mesh.shard_comms.all_gather(
            part.detach().to(self.mesh.device), "gathering a block for a checkpoint"
        )

    def _dtensors_of(self, group: FlatGroup, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert this rank's flat tensor of a group to DTensors by name, sharded by rows. A collective of the shard group."""
        ranks, rank, mesh = self.mesh.shard_comms.size, self.mesh.shard_comms.rank, self.mesh.shard_mesh["shard"]
        named = {}
        for name, whole in group.full_tensors(self._gathered(part)).items():
            chunks = whole.chunk(ranks)
            mine = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()
            named[name] = DTensor.from_local(
                mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        return named

    def _part(self, group: FlatGroup, named: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        """Return this rank's flat tensor of a group, given the DTensors in `named`. `key` is a format string that turns
        a parameter's name into a key of `named`."""
        whole = {name: named[key.format(name)].full_tensor() for name in group.names}
        return group.part(whole, self.mesh.shard_comms.rank)


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the full parameter, in whose place ZeRO-3 leaves an empty tensor."""
    return getattr(parameter, "ds_shape", parameter.shape)
