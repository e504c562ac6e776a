"""What a recipe's model weighs, and an estimate of the memory one rank needs to train it.

Nothing is allocated: the model is built on the meta device and counted. The estimate is arithmetic on those counts.
It takes the parts as if all were at their largest at once, and leaves out the device's context, the communication
library's buffers, the allocator's fragments and what torch.compile saves: good for choosing a mesh, no promise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from llmtrain.config import EveryStep, Layerwise, Overlapped, Recipe, Stale
from llmtrain.data.tokenizer import TRAIN, load_tokenizer
from llmtrain.data.tokenizer import vocab_size as size_of_tokenizer
from llmtrain.errors import ModelError
from llmtrain.model import blocks_of, build, count_parameters, flops_per_token, model_config
from llmtrain.parallel.zero_config import BUCKET
from llmtrain.sync.build import needs_anchor
from llmtrain.sync.outer import build_outer
from llmtrain.sync.schedules.overlapped import fragments_of
from llmtrain.sync.synchroniser import PREFETCH

BYTES = {"bf16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}
"""By precision: of a master value, of a value in compute precision."""
KNOWN_VOCABULARIES = {"gpt2": 50257, "openai-community/gpt2": 50257}
"""Tokens of tokenizers on the hub, which is not asked."""
SAVED_PER_LINEAR = 1.25
"""Bytes a layer keeps for backward over bytes of its linear layers' inputs and outputs. Counted on small models with
`torch.autograd.graph.saved_tensors_hooks`: Llama 1.12 to 1.28; GPT-Neo, beside its attention weights, 1.6 to 1.7."""
SAVED_PER_ATTENTION_WEIGHT = 8
"""Bytes for each weight of an attention that is not fused. GPT-Neo keeps 6 in bf16 and 4 in fp32; the rest is room."""


@dataclass(frozen=True)
class ModelSize:
    """A model in numbers."""

    parameters: int
    """Trainable; shared ones once."""
    embedding_parameters: int
    """Those in look-up tables, a tied head among them."""
    block_parameters: tuple[int, ...]
    """In forward order; see `model.blocks_of`."""
    vocabulary: int
    hidden: int
    layers: int
    linear_features: int
    """Inputs and outputs of the linear layers in one layer, summed."""
    unfused_heads: int
    """Attention heads whose whole [T, T] weights are kept; 0 with a fused attention, as most models have."""
    flops_per_token: float
    """Forward and backward at the recipe's sequence length; see `model.flops_per_token`."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank by part; see `estimate` for the formulas."""

    weights: int
    gradients: int
    optimizer: int
    anchors: int
    gathered: int
    activations: int
    loss: int
    messages: int
    host: int
    """What is kept in CPU memory instead of on the GPU: anchors, and with ZeRO's offload masters and moments."""

    @property
    def device_total(self) -> int:
        """Everything that is on the GPU."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.host

    @property
    def host_total(self) -> int:
        """What training keeps in (pinned) CPU memory."""
        return self.host


def size_of(recipe: Recipe, vocab_size: int | None = None) -> ModelSize:
    """Count the recipe's model. `vocab_size` is the tokenizer's, where it is known.

    Raises ModelError if neither the recipe nor its tokenizer's name tells the size of the vocabulary.
    """
    config = model_config(recipe.model, vocab_size or _vocabulary(recipe))
    model = build(config, recipe.parallel.loss_chunk)
    blocks = blocks_of(model)
    layer = next(block for block in blocks if block.name == "layer 0")
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    return ModelSize(
        parameters=count_parameters(model),
        embedding_parameters=sum(tables.values()),
        block_parameters=tuple(count_parameters(nn.ModuleList(block.modules)) for block in blocks),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        linear_features=sum(
            sum(linear.weight.shape)
            for part in layer.modules
            for linear in part.modules()
            if isinstance(linear, nn.Linear | Conv1D)
        ),
        unfused_heads=0 if _has_fused_attention(config) else config.num_attention_heads,
        flops_per_token=flops_per_token(model, recipe.train.sequence_length),
    )


def estimate(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> Memory:
    """Bytes on each rank of a `replicas` x `shard` mesh of GPUs, M = shard.

    With P parameters, w bytes a master (4; 8 in fp64), c bytes a value in compute precision (2, 4 or 8), and t =
    micro_batch x sequence_length tokens in a forward pass:

    weights      w P / M. ZeRO adds a copy in c: c P / M in stage 3, c P in 1 and 2
    gradients    w P / M; w P when a step accumulates over micro-batches, since only the last one is reduced. ZeRO: w P / M,
                 and in stage 1 c P more
    optimizer    AdamW: 2 w P / M; SGD: 0. With `zero_offload` this, the masters and their gradients count as `host`
    anchors      w P / M for the anchor, unless plain averages are waited for and sent unrounded, and as much for
                 outer momentum; with `sync.offload` they count as `host`
    gathered     the two largest blocks in c, the largest one's gradient in c and, on its way to being reduced, in w.
                 ZeRO: buckets of BUCKET values in c for gradients, one in stage 3 and two in 1 and 2, which gather nothing
    activations  a layer keeps l = 1.25 c t F, where F is the sum of its linear layers' inputs and outputs, plus, if its
                 attention is not fused, 8 bytes for each of heads x t x sequence_length weights. layers x l and one l
                 more for gradients; with checkpointing, c t hidden for each layer and 2 l
    loss         two copies of loss_chunk x vocabulary logits in at least fp32; the head's gradient, vocabulary x hidden, in w and c
    messages     during a synchronisation, shards of the largest block in w: prefetch + 1 under way and 2 in work, and
                 2 more to bring offloaded ones in. Means under way while training goes on (a fragment's, or all of
                 them) and rounding errors that are carried over come on top, w / M for each value
    """
    master, compute = BYTES[recipe.parallel.precision]
    train, sync = recipe.train, recipe.sync
    tokens = train.micro_batch * train.sequence_length
    shard_of_all = master * -(-size.parameters // shard)
    largest = max(size.block_parameters)

    anchors = 0
    under_way = _under_way(recipe, size)
    if needs_anchor(sync):
        anchors = shard_of_all * (2 if build_outer(sync.outer).has_momentum else 1)

    layer = int(SAVED_PER_LINEAR * compute * tokens * size.linear_features)
    layer += SAVED_PER_ATTENTION_WEIGHT * size.unfused_heads * tokens * train.sequence_length
    checkpointed = size.layers * compute * tokens * size.hidden + 2 * layer
    logits = min(recipe.parallel.loss_chunk, tokens) * size.vocabulary

    rounds = not isinstance(sync.period, EveryStep)
    prefetch = sync.schedule.prefetch if isinstance(sync.schedule, Layerwise) else PREFETCH
    in_flight = min(prefetch + 1, len(size.block_parameters)) + 2 + (2 if sync.offload and anchors else 0)
    own = _zero(recipe, size, shard) if recipe.parallel.engine == "zero" else _fsdp2(recipe, size, replicas, shard)
    return Memory(
        weights=own.weights,
        gradients=own.gradients,
        optimizer=own.optimizer,
        anchors=0 if sync.offload else anchors,
        gathered=own.gathered,
        activations=checkpointed if recipe.parallel.activation_checkpointing else (size.layers + 1) * layer,
        loss=2 * max(4, compute) * logits + (master + compute) * size.vocabulary * size.hidden,
        messages=(
            (in_flight * master * -(-largest // shard) if rounds else 0)
            + master * -(-under_way // shard)
            + (shard_of_all if sync.wire.feedback else 0)
        ),
        host=own.host + (anchors if sync.offload else 0),
    )


@dataclass(frozen=True)
class _EngineMemory:
    """What an engine keeps, in bytes; see `estimate`."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    host: int = 0


def _fsdp2(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> _EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    sharded = master * -(-size.parameters // shard)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    accumulates = recipe.train.global_batch > recipe.train.micro_batch * replicas * shard
    return _EngineMemory(
        weights=sharded,
        gradients=master * size.parameters if accumulates else sharded,
        optimizer=2 * sharded if recipe.optim.kind == "adamw" else 0,
        gathered=compute * (largest + second) + (compute + master) * largest,
    )


def _zero(recipe: Recipe, size: ModelSize, shard: int) -> _EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    parallel = recipe.parallel
    sharded = master * -(-size.parameters // shard)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    whole = compute * size.parameters
    gathers = parallel.zero_stage == 3
    optimizer = 2 * sharded if recipe.optim.kind == "adamw" else 0
    offloaded = 2 * sharded + optimizer if parallel.zero_offload else 0  # masters and gradients
    return _EngineMemory(
        weights=(0 if offloaded else sharded) + (-(-whole // shard) if gathers else whole),
        gradients=sharded + (whole if parallel.zero_stage == 1 else 0),
        optimizer=0 if offloaded else optimizer,
        gathered=compute * (largest + second + BUCKET if gathers else 2 * BUCKET),
        host=offloaded,
    )


def _under_way(recipe: Recipe, size: ModelSize) -> int:
    """Parameters whose mean is under way while training goes on: a fragment's, or with a stale schedule all."""
    schedule = recipe.sync.schedule
    if isinstance(schedule, Stale):
        return size.parameters * schedule.rounds
    if isinstance(schedule, Overlapped):
        fragments = fragments_of(schedule, len(size.block_parameters))
        return max(sum(size.block_parameters[index] for index in fragment) for fragment in fragments)
    return 0


def _vocabulary(recipe: Recipe) -> int | None:
    """The tokenizer's size without a download; None where the model's config has one itself."""
    name = recipe.data.tokenizer
    if "vocab_size" in recipe.model.config or recipe.model.from_config is not None:
        return None
    if name.startswith(TRAIN) and name.removeprefix(TRAIN).isdecimal():
        return int(name.removeprefix(TRAIN))
    if name in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[name]
    if Path(name).expanduser().exists():
        with TemporaryDirectory() as folder:
            return size_of_tokenizer(load_tokenizer(recipe.data, Path(folder)))
    raise ModelError(
        f"data.tokenizer is {name!r}, whose number of tokens is not known before it is downloaded; "
        f"give it as model.config.vocab_size"
    )


def _has_fused_attention(config: PretrainedConfig) -> bool:
    """transformers refuses to build a model with `sdpa` when its attention can't be fused."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        return False
    return True
