"""Size of a recipe's model, and an estimate of the memory that one rank needs to train it.

No weights are allocated: the model is built on the meta device and counted. The estimate is arithmetic on those
counts, for the moments of a step at which memory use peaks. It leaves out the device's context, the
communication library's buffers, allocator fragmentation and the savings of torch.compile. It is accurate enough to
choose a mesh, but does not guarantee that a run fits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from llmtrain.attention import FUSED_FAMILY
from llmtrain.config import Recipe
from llmtrain.data.tokenizer import load_tokenizer, trained_size
from llmtrain.data.tokenizer import vocab_size as size_of_tokenizer
from llmtrain.errors import ModelError
from llmtrain.files import local_path
from llmtrain.model import blocks_of, build, count_parameters, flops_per_token, model_config
from llmtrain.parallel.zero_layout import BUCKET

BYTES = {"bf16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}
"""Bytes per master value and per value in compute precision, by precision."""
KNOWN_VOCABULARIES = {"gpt2": 50257, "openai-community/gpt2": 50257}
"""Vocabulary sizes of tokenizers on the hub, which estimates do not query."""
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
SAVED_PER_ATTENTION_WEIGHT = {"bf16": 6, "fp32": 4, "fp64": 8}
"""Bytes saved per attention weight without fused attention, counted on transformers' GPT-Neo in bf16 and fp32."""
IN_BACKWARD = 1.25
"""Peak activation memory of a layer's backward pass (saved activations plus activation gradients), relative to its
saved activations."""


@dataclass(frozen=True)
class ModelSize:
    """Counts and dimensions of a model."""

    parameters: int
    """Trainable parameters; shared ones count once."""
    embedding_parameters: int
    """Parameters of lookup tables, a tied head included."""
    block_parameters: tuple[int, ...]
    """Parameters per block, in forward order; see `model.blocks_of`."""
    vocabulary: int
    hidden: int
    layers: int
    linear_features: int
    """Inputs plus outputs of the linear layers in one layer, summed."""
    linear_outputs: int
    """Outputs of those linear layers alone."""
    attention: str
    """Key of SAVED_PER_LINEAR for this model's attention."""
    unfused_heads: int
    """Attention heads whose full [T, T] weights are saved for backward; 0 with fused attention, as in most models."""
    flops_per_token: float
    """FLOPs of forward and backward at the recipe's sequence length; see `model.flops_per_token`."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes per part on one rank, each at its own peak; see `estimate` for the formulas."""

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
    """Bytes kept in (pinned) CPU memory: offloaded anchors, and with ZeRO's offload masters, moments
    and a copy of the gradients."""

    @property
    def device_total(self) -> int:
        """Return the peak bytes on the GPU."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.host

    def total(self, on_gpu: bool) -> int:
        """Return the peak bytes on the GPU or, without GPUs, of all parts, which are then in the same memory."""
        return self.device_total + (0 if on_gpu else self.host)


def size_of(recipe: Recipe, vocab_size: int | None = None) -> ModelSize:
    """Return the size of the recipe's model. `vocab_size` is the tokenizer's, if it is known.

    Raises ModelError if the vocabulary size is not given and cannot be determined without a download.
    """
    config = model_config(recipe.model, vocab_size or _vocabulary(recipe))
    model = build(config, recipe.parallel.loss_chunk)
    blocks = blocks_of(model)
    layer = next(block for block in blocks if block.name == "layer 0")
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for part in layer.modules for m in part.modules() if isinstance(m, nn.Linear | Conv1D)]
    attention = _attention(config)
    return ModelSize(
        parameters=count_parameters(model),
        embedding_parameters=sum(tables.values()),
        block_parameters=tuple(count_parameters(nn.ModuleList(block.modules)) for block in blocks),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        linear_features=sum(sum(linear.weight.shape) for linear in linears),
        linear_outputs=sum(linear.nf if isinstance(linear, Conv1D) else linear.out_features for linear in linears),
        attention=attention,
        unfused_heads=config.num_attention_heads if attention == "not fused" else 0,
        flops_per_token=flops_per_token(model, recipe.train.sequence_length),
    )


def estimate(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> Memory:
    """Estimate the bytes on each rank of a `replicas` x `shard` mesh of GPUs.

    M is `shard`, and P the number of parameters. A master value takes w bytes (4; 8 in fp64), and a value in compute
    precision c bytes (2, 4 or 8). A forward pass has t = micro_batch x sequence_length tokens.

    weights      w P / M. Without sharding (M = 1), a copy in c is added if c < w: c P. ZeRO adds a copy in c: c P / M
                 in stage 3, c P in stages 1 and 2.
    gradients    w P / M. ZeRO-1 adds c P.
    optimizer    AdamW: 2 w P / M. SGD: 0. With `zero_offload`, optimizer state, masters and a copy of the gradients
                 in w count as `host`.
    anchors      w P / M for the anchor, and as much for outer momentum. A plain average needs no anchor if replicas
                 wait for it and send it unrounded. With `sync.offload` anchors count as `host`.
    gathered     FSDP2: the two largest blocks in c, and in backward the largest one's gradient in c and, until it is
                 reduced, in w. Without sharding, only these gradients: in w, and in c if c < w. ZeRO-3: the two largest
                 blocks in c, a bucket of BUCKET gradient values in at least fp32, and in backward the largest block's
                 gradient in c. ZeRO-1 and 2: no blocks, but in backward two buckets in c.
    activations  A layer saves l = s c t F. F is the sum of its linear layers' inputs and outputs, and s is
                 SAVED_PER_LINEAR. Unfused attention adds SAVED_PER_ATTENTION_WEIGHT bytes for each of heads x t x
                 sequence_length weights. The total is layers x l, plus l / 4 for gradients. With checkpointing it is
                 c t hidden per layer, plus 5 l / 4. With `selective` it is c t (O + 2 hidden) per layer, where O is the
                 outputs of its linear layers, plus 5 l / 4.
    loss         The larger of twice the logits of loss_chunk positions in at least fp32, and the gradients of these
                 logits and of the head in c. In addition, the head's full gradient in at least fp32 and the gradient
                 of its inputs in c.
    messages     During a synchronization, shards of the largest block in w: prefetch + 1 in flight and 2 in use. With
                 offloaded anchors, also prefetch + 2 anchors and 2 momenta. Means in flight during local steps (of one
                 fragment or of all blocks) and rounding errors for error feedback add w / M per value, and stay.

    These parts do not all peak at the same time. In addition to the parts that stay (weights, optimizer, anchors, means
    in flight and rounding errors), memory holds at most

    at the end of forward      activations of all layers, the loss, gathered blocks; gradients of earlier micro-batches
    when backward begins       these activations, gathered blocks, their gradients; gradients of earlier micro-batches
    when backward ends         one layer's activations, gathered blocks, their gradients; all other gradients
    during a synchronization   messages; if layer by layer in forward, also activations and gathered blocks

    `non_coincident` is the largest of these minus the sum of all parts that do not stay. ZeRO-3 keeps its gradient
    memory allocated at all times.

    Compared with torch's allocator on a CPU (one rank, Llama with and without checkpointing or accumulation,
    GPT-Neo, DiLoCo, EDiT, ZeRO 1 to 3), the estimate was off by -1 to +9 %, but by -12 % for ZeRO-3 with full
    checkpointing. Models that save more between their linear layers need more: Qwen3, which normalizes queries and
    keys, 8 % more; GPT-2, because of its dropout, twice as much.
    """
    master, compute = BYTES[recipe.parallel.precision]
    train, sync = recipe.train, recipe.sync
    tokens = train.micro_batch * train.sequence_length
    shard_of_all = master * -(-size.parameters // shard)

    anchors = 0
    if sync.needs_anchor:
        anchors = shard_of_all * (2 if sync.outer.has_momentum else 1)
    in_flight, stay = _messages(recipe, size, shard, has_anchors=anchors > 0)
    of_torch = _fsdp2 if shard > 1 else _single_device
    own = (_zero if recipe.parallel.engine == "zero" else of_torch)(recipe, size, replicas, shard)

    layer = _kept_by_layer(recipe, size)
    in_backward = int(IN_BACKWARD * layer)
    if recipe.parallel.activation_checkpointing:
        selected = size.linear_outputs + size.hidden if recipe.parallel.activation_checkpointing == "selective" else 0
        of_one = compute * tokens * (size.hidden + selected)
        forward, backward, last = size.layers * of_one, size.layers * of_one + in_backward, of_one + in_backward
    else:
        forward, backward, last = size.layers * layer, (size.layers - 1) * layer + in_backward, in_backward
    loss = _loss(recipe, size, tokens)

    moments = (
        own.early_gradients + forward + own.gathered_in_forward + loss,
        own.early_gradients + backward + own.gathered,
        own.late_gradients + last + own.gathered,
        own.early_gradients + in_flight + (forward + own.gathered_in_forward if sync.schedule.syncs_in_forward else 0),
    )
    sum_of_these = own.gradients + backward + own.gathered + loss + in_flight
    return Memory(
        weights=own.weights,
        gradients=own.gradients,
        optimizer=own.optimizer,
        anchors=0 if sync.offload else anchors,
        gathered=own.gathered,
        activations=backward,
        loss=loss,
        messages=in_flight + stay,
        non_coincident=max(moments) - sum_of_these,
        host=own.host + (anchors if sync.offload else 0),
    )


def _messages(recipe: Recipe, size: ModelSize, shard: int, has_anchors: bool) -> tuple[int, int]:
    """Return the bytes of messages as (only during a synchronization, also between synchronizations)."""
    master, _ = BYTES[recipe.parallel.precision]
    sync, largest = recipe.sync, max(size.block_parameters)
    if sync.period.averages_gradients:
        return 0, 0
    in_flight = sync.schedule.blocks_in_flight
    blocks = min(in_flight, len(size.block_parameters)) + 2
    if sync.offload and has_anchors:
        blocks += min(in_flight + 1, len(size.block_parameters)) + 2
    stay = master * -(-sync.schedule.parameters_in_flight(size.block_parameters, sync.period) // shard)
    errors = master * -(-size.parameters // shard) if sync.wire.error_feedback else 0
    return blocks * master * -(-largest // shard), stay + errors


def _kept_by_layer(recipe: Recipe, size: ModelSize) -> int:
    """Return the bytes that a layer saves for backward."""
    precision, train = recipe.parallel.precision, recipe.train
    _, compute = BYTES[precision]
    tokens = train.micro_batch * train.sequence_length
    linear = SAVED_PER_LINEAR[size.attention][precision] * compute * tokens * size.linear_features
    weights = size.unfused_heads * tokens * train.sequence_length
    return int(linear) + SAVED_PER_ATTENTION_WEIGHT[precision] * weights


def _loss(recipe: Recipe, size: ModelSize, tokens: int) -> int:
    """Return the peak bytes that `loss.summed_cross_entropy` needs."""
    _, compute = BYTES[recipe.parallel.precision]
    wide = max(4, compute)
    logits, head = min(recipe.parallel.loss_chunk, tokens) * size.vocabulary, size.vocabulary * size.hidden
    in_chunk = max(2 * wide * logits, compute * (logits + head))
    return in_chunk + wide * head + compute * tokens * size.hidden


@dataclass(frozen=True)
class _EngineMemory:
    """Estimated bytes of an engine; see `estimate` for the formulas."""

    weights: int
    gradients: int
    early_gradients: int
    """Gradients that exist before the last backward pass."""
    late_gradients: int
    """Gradients that exist while that pass computes its last block."""
    optimizer: int
    gathered: int
    gathered_in_forward: int
    host: int = 0


def _accumulates(recipe: Recipe, replicas: int, shard: int) -> bool:
    return recipe.train.global_batch > recipe.train.micro_batch * replicas * shard


def _fsdp2(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> _EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    sharded = master * -(-size.parameters // shard)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    accumulates = _accumulates(recipe, replicas, shard)
    return _EngineMemory(
        weights=sharded,
        gradients=sharded,
        early_gradients=sharded if accumulates else 0,
        late_gradients=sharded if accumulates else sharded - master * -(-largest // shard),
        optimizer=2 * sharded if recipe.optim.kind == "adamw" else 0,
        gathered=compute * (largest + second) + (compute + master) * largest,
        gathered_in_forward=compute * (largest + second),
    )


def _single_device(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> _EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    all_of_it, largest = master * size.parameters, max(size.block_parameters)
    rounded = 0 if compute == master else compute
    accumulates = _accumulates(recipe, replicas, shard)
    return _EngineMemory(
        weights=all_of_it + rounded * size.parameters,
        gradients=all_of_it,
        early_gradients=all_of_it if accumulates else 0,
        late_gradients=all_of_it if accumulates else all_of_it - master * largest,
        optimizer=2 * all_of_it if recipe.optim.kind == "adamw" else 0,
        # The gradients of earlier micro-batches, to which rounded ones are added without a copy, count above.
        gathered=(rounded + (0 if rounded and accumulates else master)) * largest,
        gathered_in_forward=0,
    )


def _zero(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> _EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    parallel = recipe.parallel
    sharded = master * -(-size.parameters // shard)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    whole = compute * size.parameters
    gathers = parallel.zero_stage == 3
    optimizer = 2 * sharded if recipe.optim.kind == "adamw" else 0
    offloaded = 2 * sharded + optimizer if parallel.zero_offload else 0  # masters and gradients
    gradients = sharded + (whole if parallel.zero_stage == 1 else 0)
    in_forward = compute * (largest + second) + max(4, compute) * BUCKET if gathers else 0
    return _EngineMemory(
        weights=(0 if offloaded else sharded) + (-(-whole // shard) if gathers else whole),
        gradients=gradients,
        early_gradients=gradients if gathers or _accumulates(recipe, replicas, shard) else 0,
        late_gradients=gradients,
        optimizer=0 if offloaded else optimizer,
        gathered=in_forward + compute * largest if gathers else compute * 2 * BUCKET,
        gathered_in_forward=in_forward,
        host=offloaded,
    )


def _vocabulary(recipe: Recipe) -> int | None:
    """Return the tokenizer's vocabulary size without a download, or None if the model's config gives it."""
    name = recipe.data.tokenizer
    if "vocab_size" in recipe.model.config or recipe.model.from_config is not None:
        return None
    if (size := trained_size(name)) is not None:
        return size
    if name in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[name]
    if local_path(name) is not None:
        with TemporaryDirectory() as folder:
            return size_of_tokenizer(load_tokenizer(recipe.data, Path(folder)))
    raise ModelError(
        f"data.tokenizer is {name!r}, whose number of tokens is not known before it is downloaded; "
        f"give it as model.config.vocab_size"
    )


def _attention(config: PretrainedConfig) -> str:
    """Return the key of the model's attention in SAVED_PER_LINEAR. transformers refuses to build a model with `sdpa`
    if its attention cannot be fused."""
    if config.model_type == FUSED_FAMILY:
        return FUSED_FAMILY
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        return "not fused"
    return "fused"
