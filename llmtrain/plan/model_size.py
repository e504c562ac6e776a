"""Counts and dimensions of a recipe's model. No weights are allocated: the model is built on the meta device and counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from llmtrain.attention import CAUSAL_FAMILIES, FUSED_FAMILY
from llmtrain.config import Recipe
from llmtrain.data.tokenizer import load_tokenizer, trained_size
from llmtrain.data.tokenizer import vocab_size as size_of_tokenizer
from llmtrain.errors import ModelError
from llmtrain.files import local_path
from llmtrain.model import blocks_of, build, count_parameters, flops_per_token, model_config

KNOWN_VOCABULARIES = {"gpt2": 50257, "openai-community/gpt2": 50257}
"""Vocabulary sizes of tokenizers on the hub, which estimates do not query."""


@dataclass(frozen=True)
class ModelSize:
    """Counts and dimensions of a model."""

    parameters: int
    """Trainable parameters; shared ones count once."""
    embedding_parameters: int
    """Parameters of lookup tables, including a tied head."""
    block_parameters: tuple[int, ...]
    """Parameters per block, in forward order; see `model.blocks_of`."""
    layer_matrices: tuple[tuple[int, int], ...]
    """Shapes of the matrices in one layer."""
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
    masks: int
    """Number of masks [T, T] per sequence that are saved for backward if documents are kept apart: one for each layer with
    fused attention to the complete sequence, or a single one if all layers share it."""
    flops_per_token: float
    """FLOPs of forward and backward at the recipe's sequence length; see `model.flops_per_token`."""


def size_of(recipe: Recipe, vocab_size: int | None = None) -> ModelSize:
    """Return the size of the recipe's model. `vocab_size` is the tokenizer's, if it is known.

    Raises ModelError if the vocabulary size is not given and cannot be determined without a download.
    """
    config = model_config(recipe.model, vocab_size or _vocabulary(recipe))
    key = config.to_json_string(use_diff=False), recipe.parallel.loss_chunk, recipe.train.sequence_length
    if key not in _sizes:
        _sizes[key] = _count(config, recipe.parallel.loss_chunk, recipe.train.sequence_length)
    return _sizes[key]


_sizes: dict[tuple[str, int, int], ModelSize] = {}
"""Sizes by config, loss chunk and sequence length, kept because a command asks for the same size several times and
building a model takes 0.1 s."""


def _count(config: PretrainedConfig, loss_chunk: int, sequence_length: int) -> ModelSize:
    model = build(config, loss_chunk)
    blocks = blocks_of(model)
    layer = next(block for block in blocks if block.name == "layer 0")
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for part in layer.modules for m in part.modules() if isinstance(m, nn.Linear | Conv1D)]
    attention = _attention(config)
    return ModelSize(
        parameters=count_parameters(model),
        embedding_parameters=sum(tables.values()),
        block_parameters=tuple(count_parameters(nn.ModuleList(block.modules)) for block in blocks),
        layer_matrices=tuple(tuple(p.shape) for part in layer.modules for p in part.parameters() if p.ndim == 2),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        linear_features=sum(sum(linear.weight.shape) for linear in linears),
        linear_outputs=sum(linear.nf if isinstance(linear, Conv1D) else linear.out_features for linear in linears),
        attention=attention,
        unfused_heads=config.num_attention_heads if attention == "not fused" else 0,
        masks=_masks(config, attention, sequence_length),
        flops_per_token=flops_per_token(model, sequence_length),
    )


def _vocabulary(recipe: Recipe) -> int | None:
    """Return the tokenizer's vocabulary size without a download, or None if the model's config gives it."""
    name = recipe.data.tokenizer
    if "vocab_size" in recipe.model.config:
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


def _masks(config: PretrainedConfig, attention: str, sequence_length: int) -> int:
    """Return `ModelSize.masks`. GPT-Neo's local layers do not count, because they need a mask for their window in any
    case, unless the window is at least as long as the sequence."""
    if config.model_type in CAUSAL_FAMILIES:
        return 1
    if attention == FUSED_FAMILY:
        is_local = config.window_size < sequence_length
        return config.num_hidden_layers - (config.attention_layers.count("local") if is_local else 0)
    return config.num_hidden_layers if attention == "fused" else 0


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
