"""Estimate of the memory that one process needs to train a recipe.

The estimate is computed from the model's counts, for the moments of a step at which memory use peaks. It leaves out the
device's context, the communication library's buffers and allocator fragmentation. It is accurate enough to choose a
mesh, but does not guarantee that a run fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from llmtrain.attention import FUSED_FAMILY
from llmtrain.checkpoint_retention import max_on_disk
from llmtrain.config import PrimalAverageSection, Recipe, WireSection
from llmtrain.parallel.sparse_format import CHUNK, SparseFormat
from llmtrain.parallel.wire_format import SCALE_GROUP_SIZE, WireFormat
from llmtrain.parallel.zero_layout import BUCKET
from llmtrain.plan.engine_memory import BYTES, engine_memory, moment_values
from llmtrain.plan.model_size import ModelSize
from llmtrain.step_counts import warmup_steps

SAVED_PER_LINEAR = {
    "fused": {"bf16": 1.2, "fp32": 1.1, "fp64": 1.1},
    FUSED_FAMILY: {"bf16": 1.65, "fp32": 1.65, "fp64": 1.65},
    "not fused": {"bf16": 1.75, "fp32": 1.6, "fp64": 1.6},
}
"""Bytes that a layer saves for backward per byte of its linear layers' inputs and outputs, by kind of attention and
precision.

Counted with `torch.autograd.graph.saved_tensors_hooks`. Llama: 1.20 in bf16 and 1.09 to 1.10 in fp32, slightly more
with grouped heads (1.23, 1.13). GPT-Neo: 1.56 in global and 1.70 in local layers. GPT-Neo with transformers'
attention, whose weights are not included: 1.69 to 1.74 in bf16 and 1.57 to 1.59 in fp32.
"""
SAVED_PER_COMPILED_LINEAR = {"fused": 0.85, FUSED_FAMILY: 1.0}
"""The same for compiled layers, in which torch.compile computes cheap results again in backward, in any precision.

Counted in the same way. Llama: 0.84 in bf16 and fp32. GPT-Neo: 0.96 in fp32. For layers without fused attention, the
estimate is as if they were not compiled."""
SAVED_PER_ATTENTION_WEIGHT = {"bf16": 6, "fp32": 4, "fp64": 8}
"""Bytes saved per attention weight without fused attention, counted on transformers' GPT-Neo in bf16 and fp32."""
IN_BACKWARD = 1.25
"""Peak activation memory of a layer's backward pass (saved activations plus activation gradients), relative to its
saved activations."""
EXPORTED = 4
"""Bytes per parameter of an export for an evaluation, in fp32."""
KEPT_SHARE, KEPT_BYTES = 0.1, 2**28
"""Largest fraction of a rank's estimated memory, and number of bytes, by which gathered parameters may increase it. Above both,
`auto` frees them after forward."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes per part in one process, each at its own peak; see `estimate` for the formulas."""

    weights: int
    gradients: int
    optimizer: int
    anchors: int
    gathered: int
    activations: int
    loss: int
    messages: int
    non_coincident: int
    """Negative correction that makes the parts on the GPU sum to its peak, because the parts do not all peak at the
    same time."""
    host: int
    """Bytes kept in (pinned) CPU memory: offloaded anchors and, with ZeRO's offload, masters, moments and copies of
    gradients and parameters."""
    host_rounding: int
    """Bytes by which torch rounds up the pinned memory of offloaded anchors. Without GPUs, memory is not pinned."""
    host_models: int
    """Bytes of models kept in CPU memory for messages. With GPUs, most of this memory is pinned, and torch takes up to
    twice as much."""
    host_checkpoint: int
    """Bytes of the copy from which a checkpoint is written. With GPUs, this memory is pinned. torch rounds each tensor
    up to a power of two, so it may take up to twice as much."""
    host_validation: int
    """Bytes of the copy of a replica's own parameters while other parameters are validated. With GPUs, it is pinned
    block by block."""

    @property
    def device_total(self) -> int:
        """Peak bytes on the GPU."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.host_total

    @property
    def pinned_total(self) -> int:
        """Bytes of pinned CPU memory that a rank with a GPU takes at all times."""
        return self.host + self.host_rounding

    @property
    def host_total(self) -> int:
        """Bytes of CPU memory that a rank with a GPU takes."""
        return self.pinned_total + self.host_models + self.host_checkpoint + self.host_validation

    def total(self, on_gpu: bool) -> int:
        """Return the peak bytes on the GPU or, without GPUs, of all parts, which are then in the same memory."""
        return self.device_total + (0 if on_gpu else self.host + self.host_models + self.copies_on_cpu)

    @property
    def copies_on_cpu(self) -> int:
        """Bytes that copies for checkpoints and validation add without GPUs. A checkpoint is written while training
        continues. Validation keeps neither gradients nor activations, so its copy takes their place."""
        return self.host_checkpoint + max(0, self.host_validation - self.gradients - self.activations)


def estimate(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> Memory:
    """Estimate the bytes that each process of a `replicas` x `shards` mesh of GPUs needs, for its one rank, or for all replicas
    if these take turns in one process.

    M is `shards`, and P the number of parameters. A master value takes w bytes (4; 8 in fp64), and a value in compute
    precision c bytes (2, 4 or 8). A forward pass has t = micro_batch x sequence_length tokens.

    weights      w P / M. Without sharding (M = 1), a copy in c is added if c < w: c P. ZeRO adds a copy in c: c P / M
                 in stage 3, c P in stages 1 and 2.
    gradients    w P / M. ZeRO-1 adds c P if it accumulates over micro-batches; otherwise they are in its buckets.
    optimizer    AdamW: 2 w P / M. Muon: w P / M for the matrices of layers, AdamW's for the rest. SGD: 0. With `zero_offload`,
                 optimizer state, masters and a copy of the gradients in w count as `host`. So does a buffer: in stage 3, a
                 second copy of the gradients, in place of those on the device; in stages 1 and 2, the parameters in c, c P / M.
    anchors      w P / M for the anchor, and as much for outer momentum. A plain average needs no anchor if replicas
                 wait for it and send it unrounded. With `sync.offload` anchors count as `host`. They are pinned block by
                 block, for which torch takes the next power of two: `host_rounding` is the difference.
    gathered     FSDP2: the two largest blocks in c, or all of them if they stay gathered (`reshards`), and in backward the
                 largest one's gradient in c and, until it is reduced, in w. Without sharding, only these gradients: in w,
                 and in c if c < w. ZeRO-3: the two largest blocks in c, or, if several ranks gather ahead (not if blocks
                 synchronize in forward), the largest one and LIVE values, at most all; a bucket of BUCKET gradient
                 values in at least fp32, in backward the largest block's gradient in c, and while a bucket is reduced a copy
                 of its values in fp32. ZeRO-1 and 2: no blocks, but in backward two buckets in c, and while a bucket is
                 reduced a copy of its values in c and, if c < 4, in fp32.
    activations  A layer saves l = s c t F. F is the sum of its linear layers' inputs and outputs, and s is
                 SAVED_PER_LINEAR, or SAVED_PER_COMPILED_LINEAR with `compile`. Unfused attention adds
                 SAVED_PER_ATTENTION_WEIGHT bytes for each of heads x t x sequence_length weights. The total is
                 layers x l, plus l / 4 for gradients. With checkpointing it is c t hidden per layer, plus 5 l / 4. With
                 `selective` it is c t (O + 2 hidden) per layer, where O is the outputs of its linear layers, plus
                 5 l / 4. With `document_mask`, masks of c t sequence_length are added: one for each layer that attends
                 to the whole sequence, or a single one for Llama and with checkpointing.
    loss         The larger of (a) the logits of loss_chunk positions, twice in at least fp32 and in bf16 once more, and
                 (b) the gradients of these logits and of the head in c. In addition, the head's full gradient in at least
                 fp32 and the gradient of its inputs in c.
    messages     During a synchronization, shards of the largest block in w: prefetch + 1 in flight and 2 in use. With
                 offloaded anchors, also prefetch + 2 anchors and 2 momenta. Means in flight during local steps (of one
                 fragment or of all blocks) and rounding errors for error feedback add w / M per value, and stay. Rounded
                 messages in flight need no more than their means: what a rank sends and what it receives (over gloo, as
                 much again). With error feedback, these bytes are added, because a message's own errors stay until it arrives.
    host_models  w P / M for each model that a schedule keeps in CPU memory if there are several replicas: two with
                 `wait_avoiding`, the newest one and a copy whose sum over a group is in flight.
    host_checkpoint  With `checkpoint.background`, masters, optimizer state, anchors and the messages that stay. Without it,
                 offloaded anchors.
    host_validation  w P / M if the replicas' mean, or with GPA the anchor, is validated in the place of a replica's parameters.

    These parts do not all peak at the same time. In addition to the parts that stay (weights, optimizer, anchors, means
    in flight and rounding errors), memory holds at most

    at the end of forward      activations of all layers, the loss, gathered blocks; gradients of earlier micro-batches
    when backward begins       these activations, gathered blocks, their gradients; gradients of earlier micro-batches
    when backward ends         one layer's activations, gathered blocks, their gradients; all other gradients
    after backward (ZeRO)      buckets and the copies of the last one; in stages 2 and 3, gradients of earlier micro-batches
                               and buckets
    during a synchronization   messages; if layer by layer in forward, also activations and gathered blocks

    `non_coincident` is the largest of these minus the sum of all parts that do not stay. ZeRO-3 keeps its gradient
    memory allocated at all times.

    If n replicas are in one process, each has its own weights, optimizer, anchors and messages. They compute in turns, and a
    turn ends where a replica waits for the others. While one replica computes, each of the others holds at most one of these:
    its gradients (in synchronous steps), the activations of all layers (if blocks synchronize in forward), or the last block's
    mean in w (after other rounds). So gradients count n times in the first case, and activations in the second. The loss and
    the gathered blocks count once.

    Compared with the allocators of emulated GPUs and, for compiled layers, of a CPU, the estimate was off by -8 to +8 %
    (`benchmarks/memory.py`: a Llama of 33 M parameters with every engine, one or two ranks, each way of recomputing, with and
    without accumulation). Models that save more between their linear layers need more memory than estimated: Qwen3 8 % more,
    because it normalizes queries and keys, and GPT-2 twice as much, because of its dropout.
    """
    master, compute = BYTES[recipe.parallel.precision]
    train, sync = recipe.train, recipe.sync
    tokens = train.micro_batch * train.sequence_length
    shard_of_all = master * -(-size.parameters // shards)

    anchors = shard_of_all * _anchor_copies(recipe)
    in_turns = recipe.parallel.ranks_per_process
    in_flight, stay, encoded = (in_turns * part for part in _messages(recipe, size, replicas, shards, anchors > 0))
    resharding = recipe.parallel.engine == "fsdp2" and shards > 1 and reshards(recipe, size, replicas, shards)
    own = engine_memory(recipe, size, replicas, shards, resharding)

    layer, mask = _kept_by_layer(recipe, size), _mask(recipe, size)
    in_backward = int(IN_BACKWARD * layer) + mask
    if recipe.parallel.activation_checkpointing:
        selected = size.linear_outputs + size.hidden if recipe.parallel.activation_checkpointing == "selective" else 0
        of_one = compute * tokens * (size.hidden + selected)
        forward = size.layers * of_one
        backward, last = forward + in_backward, of_one + in_backward
    else:
        forward = size.layers * layer + size.masks * mask
        backward, last = forward - layer - mask + in_backward, in_backward
    loss = _loss(recipe, size, tokens)

    is_synchronous = sync.period.averages_gradients or warmup_steps(recipe) > 0
    gradients_of_others = (in_turns - 1) * own.gradients if is_synchronous else 0
    forward_of_others = (in_turns - 1) * forward if sync.schedule.syncs_in_forward else 0
    last_of_others = 0 if sync.period.averages_gradients else (in_turns - 1) * master * size.block_parameters[-1]
    of_others = max(gradients_of_others, forward_of_others, last_of_others)
    in_sync = forward + forward_of_others + own.gathered_in_forward if sync.schedule.syncs_in_forward else 0

    gathered_in_backward = own.gathered + (own.reduced if size.parameters > BUCKET else 0)
    moments = (
        of_others + own.early_gradients + forward + own.gathered_in_forward + loss,
        of_others + own.early_gradients + backward + gathered_in_backward,
        of_others + own.late_gradients + last + gathered_in_backward,
        of_others + own.gradients_before_the_last_bucket + own.buckets + own.reduced,
        own.early_gradients + in_flight + in_sync,
    )
    moments_of_all = master * moment_values(recipe, size, shards)
    gradients = own.gradients + gradients_of_others
    activations = backward + forward_of_others
    gathered = own.gathered + own.reduced
    sum_of_these = gradients + activations + gathered + loss + in_flight
    is_apart = replicas > 1 and not sync.period.averages_gradients
    validates_others = is_apart or isinstance(sync.outer, PrimalAverageSection)
    return Memory(
        weights=in_turns * own.weights,
        gradients=gradients,
        optimizer=in_turns * own.optimizer,
        anchors=0 if sync.offload else in_turns * anchors,
        gathered=gathered,
        activations=activations,
        loss=loss,
        messages=in_flight + stay + encoded,
        non_coincident=max(moments) - sum_of_these,
        host=in_turns * (own.host + (anchors if sync.offload else 0)),
        host_rounding=in_turns * _rounding(recipe, size, shards, anchors) if sync.offload else 0,
        host_models=sync.schedule.models_in_cpu_memory * shard_of_all if replicas > 1 else 0,
        host_checkpoint=_checkpoint_copy(recipe, in_turns * (shard_of_all + moments_of_all) + stay, in_turns * anchors),
        host_validation=in_turns * shard_of_all if validates_others else 0,
    )


def checkpoint_bytes(recipe: Recipe, size: ModelSize, replicas: int) -> int:
    """Return the bytes of a checkpoint: each replica's masters, optimizer state and rounding errors, and one copy of
    anchors and outer momentum, which replicas share. Messages in flight are left out."""
    master, _ = BYTES[recipe.parallel.precision]
    sync = recipe.sync
    own = size.parameters * (2 if sync.wire.error_feedback else 1) + moment_values(recipe, size)
    return master * (replicas * own + size.parameters * _anchor_copies(recipe))


def run_bytes(recipe: Recipe, size: ModelSize, replicas: int) -> int:
    """Return the largest number of bytes that a run has on disk: its checkpoints, and the exports that background evaluations
    leave if each of them is done before the next checkpoint."""
    steps, checkpoint, suite = recipe.train.total_steps, recipe.checkpoint, recipe.eval.suite
    exports = 0 if suite is None else math.ceil(steps / ((checkpoint.every or steps) * suite.every))
    return (
        max_on_disk(steps, checkpoint) * checkpoint_bytes(recipe, size, replicas) + exports * EXPORTED * size.parameters
    )


def copies_background_checkpoints(recipe: Recipe) -> bool:
    """Return whether checkpoints are copied because they are written in the background. Under ZeRO, all checkpoints are
    copied in any case."""
    return recipe.checkpoint.background and recipe.parallel.engine != "zero"


def _checkpoint_copy(recipe: Recipe, others: int, anchors: int) -> int:
    """Return the bytes in CPU memory of the copy from which a checkpoint is written. In the background or under ZeRO,
    everything is copied; otherwise only offloaded anchors are, which pass through the device."""
    if recipe.checkpoint.background or recipe.parallel.engine == "zero":
        return others + anchors
    return anchors if recipe.sync.offload else 0


def reshards(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> bool:
    """Return whether FSDP2 frees gathered parameters between forward and backward (`parallel.reshard_after_forward`).
    For `auto`, it does if gathered parameters would take more than both KEPT_BYTES and KEPT_SHARE of the estimate. The
    result is the same on all ranks, because it depends only on the recipe and the mesh."""
    given = recipe.parallel.reshard_after_forward
    if given != "auto":
        return given
    _, compute = BYTES[recipe.parallel.precision]
    freeing = recipe.parallel.model_copy(update={"reshard_after_forward": True})
    lowest = estimate(recipe.model_copy(update={"parallel": freeing}), size, replicas, shards)
    return compute * size.parameters > max(KEPT_BYTES, KEPT_SHARE * lowest.device_total)


def _anchor_copies(recipe: Recipe) -> int:
    """Return the number of tensors of the model's size in the anchor and the outer optimizer's state. Runs that average
    gradients in every step have neither."""
    sync = recipe.sync
    has_anchor = sync.needs_anchor and not sync.period.averages_gradients
    return 1 + len(sync.outer.state) if has_anchor else 0


def _rounding(recipe: Recipe, size: ModelSize, shards: int, anchors: int) -> int:
    """Return the bytes by which the pinned memory of anchors exceeds the anchors, because torch rounds the memory of
    each block up to a power of two."""
    master, _ = BYTES[recipe.parallel.precision]
    blocks = [master * -(-parameters // shards) for parameters in size.block_parameters]
    copies = round(anchors / sum(blocks))
    return copies * sum((1 << (block - 1).bit_length()) - block for block in blocks)


def _messages(recipe: Recipe, size: ModelSize, replicas: int, shards: int, has_anchors: bool) -> tuple[int, int, int]:
    """Return three numbers of bytes: of messages during a synchronization only, of messages and errors that stay
    between synchronizations, and of encoded messages, which stay as well but are not in a checkpoint."""
    master, _ = BYTES[recipe.parallel.precision]
    sync, largest = recipe.sync, -(-max(size.block_parameters) // shards)
    if sync.period.averages_gradients:
        return 0, 0, 0
    in_flight = min(sync.schedule.blocks_in_flight, len(size.block_parameters))
    blocks = in_flight + 2
    if sync.offload and has_anchors:
        blocks += min(sync.schedule.blocks_in_flight + 1, len(size.block_parameters)) + 2
    encoded = _encoded_bytes(sync.wire, replicas, master) if sync.wire.error_feedback else 0.0
    values = -(-sync.schedule.parameters_in_flight(size.block_parameters, sync.period) // shards)
    errors = master * -(-size.parameters // shards) if sync.wire.error_feedback else 0
    during = blocks * master * largest + int(in_flight * encoded * largest)
    return during, master * values + errors, int(encoded * values)


def _encoded_bytes(wire: WireSection, replicas: int, master: int) -> float:
    """Return the bytes per value of an encoded message in flight: what a rank sends and what it receives from all ranks."""
    if wire.kind == "topk":
        return (1 + replicas) * SparseFormat(wire.keep, wire.values).size(CHUNK, master) / CHUNK
    return 2 * WireFormat(wire.kind).size(SCALE_GROUP_SIZE) / SCALE_GROUP_SIZE


def _kept_by_layer(recipe: Recipe, size: ModelSize) -> int:
    """Return the bytes that a layer saves for backward."""
    precision, train = recipe.parallel.precision, recipe.train
    _, compute = BYTES[precision]
    tokens = train.micro_batch * train.sequence_length
    per_linear = SAVED_PER_LINEAR[size.attention][precision]
    if recipe.parallel.compile:
        per_linear = SAVED_PER_COMPILED_LINEAR.get(size.attention, per_linear)
    linear = per_linear * compute * tokens * size.linear_features
    weights = size.unfused_heads * tokens * train.sequence_length
    return int(linear) + SAVED_PER_ATTENTION_WEIGHT[precision] * weights


def _mask(recipe: Recipe, size: ModelSize) -> int:
    """Return the bytes of one mask that keeps documents apart. The mask is in compute precision, as fused attention requires."""
    separates = recipe.train.document_mask and recipe.data.packing == "packed" and size.masks > 0
    _, compute = BYTES[recipe.parallel.precision]
    return compute * recipe.train.micro_batch * recipe.train.sequence_length**2 if separates else 0


def _loss(recipe: Recipe, size: ModelSize, tokens: int) -> int:
    """Return the peak bytes that `loss.summed_cross_entropy` needs."""
    _, compute = BYTES[recipe.parallel.precision]
    wide = max(4, compute)
    logits, head = min(recipe.parallel.loss_chunk, tokens) * size.vocabulary, size.vocabulary * size.hidden
    rounded = 0 if compute == wide else compute
    in_chunk = max((2 * wide + rounded) * logits, compute * (logits + head))
    return in_chunk + wide * head + compute * tokens * size.hidden
