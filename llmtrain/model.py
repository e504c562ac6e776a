"""A transformers causal language model, cut into the blocks that are gathered and synchronized.

Models are built on the meta device. `initialize` fills one block at a time, so a rank never holds more than one full
block in addition to its shards. A weight is drawn from the seed and its own name, or read by its name, so all replicas
start with the same weights on any mesh.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.attention import (
    CAUSAL_FAMILIES,
    FUSED_FAMILY,
    UNMASKED,
    document_ids,
    fuse_attention,
    position_ids,
    prepared_mask,
)
from llmtrain.config import ModelSection
from llmtrain.errors import ModelError, first_line
from llmtrain.loss import LossHead
from llmtrain.seeding import derive_seed

LOGIT_CHANGING_KEYS = (
    *("final_logit_softcapping", "logits_soft_cap"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_logit_soft_cap", "logits_mup_width_multiplier"),
)
"""Config keys that make a model change the logits after the head. The loss of this package does not apply such changes."""
IGNORE_POSITIONS = (
    *("biogpt", "bloom", "falcon", "mpt", "openai-gpt", "xglm"),
    *("bamba", "falcon_mamba", "jamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
)
"""Model types in which packed documents see each other: transformers builds their masks without looking at positions, or
a state passes from token to token."""
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Values of `layer_types` in a config for layers whose masks separate documents."""
EQUAL_IN_ALL_LAYERS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Config keys that estimates of work and memory read once for all layers."""
SCALED_RESIDUALS = ("gpt2", "gpt_bigcode")
"""Model types whose projections onto the residual stream, `c_proj`, start smaller by a factor of sqrt(2 x layers)."""
PREFIX = "causal_lm."
"""Prefix that LanguageModel adds to transformers' parameter names."""
ReadWeight = Callable[[str], torch.Tensor]
"""Function that returns a full weight in fp32 on the CPU, by its name in the transformers model."""
WRONG_KIND = re.compile(r"Field '(?P<name>\w+)' expected (?P<kind>.+), got \S+ \(value: .*\)", re.DOTALL)
"""Pattern of the reason that transformers gives for a config value of the wrong type."""
RANDOMLY_INITIALIZED = (nn.Linear, nn.Embedding, Conv1D)
"""Modules whose weights are drawn from a normal distribution."""


@dataclass(frozen=True)
class ModelBlock:
    """Modules that are gathered and synchronized together, in forward order. `name` appears in messages."""

    name: str
    modules: list[nn.Module]

    @property
    def is_layer(self) -> bool:
        """True for one of the model's repeated layers."""
        return self.name.startswith("layer ")


class LanguageModel(nn.Module):
    """Causal language model whose forward returns its loss: (input_ids, labels) [B, T] -> summed loss, a scalar.

    Labels are already shifted; positions with label -100 are excluded. Logits exist for `loss_chunk` positions at a
    time. `separator` is the id of the token that ends a document. If it is given, no token sees another document, and
    position ids restart in each document.
    """

    def __init__(self, causal_lm: PreTrainedModel, loss_chunk: int, separator: int | None = None):
        super().__init__()
        self.causal_lm, self._separator = causal_lm, separator
        if causal_lm.config.model_type == FUSED_FAMILY:
            fuse_attention(causal_lm, separates_documents=separator is not None)
        head = causal_lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                f"model: {type(causal_lm).__name__} has no linear output head; choose a causal language model"
            )
        causal_lm.set_output_embeddings(LossHead.from_linear(head, loss_chunk))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.causal_lm.get_output_embeddings()(self.hidden(input_ids), labels)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the head: [B, T] -> [B, T, hidden]."""
        documents = None if self._separator is None else document_ids(input_ids, self._separator)
        mask = prepared_mask(self.causal_lm.config.model_type, input_ids, documents)
        inputs = {"input_ids": input_ids}
        if mask is not None and mask.dtype == torch.bool:
            # Every layer would convert a bool mask to the dtype of its queries, and save its own copy for backward. All layers
            # share a mask that is converted here.
            inputs = {"inputs_embeds": self.causal_lm.get_input_embeddings()(input_ids)}
            mask = torch.where(mask, 0.0, -torch.inf).to(inputs["inputs_embeds"].dtype)
        return self.causal_lm.base_model(
            **inputs,
            position_ids=None if documents is None else position_ids(documents),  # transformers builds masks from these
            attention_mask=mask,
            use_cache=False,
        ).last_hidden_state


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in the model's table of learned positions. Return None if it has no such table, because it
    computes positions (rotary ones, for example) or has no limit."""
    limit, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words)
    return limit if limit is not None and any(table.num_embeddings >= limit for table in tables) else None


def model_config(section: ModelSection, vocab_size: int | None = None) -> PretrainedConfig:
    """Return the transformers config that a recipe's `model` section describes.

    `vocab_size` (the tokenizer's) is the default for a section with neither `vocab_size` nor `from_config`. Raises
    ModelError if the config can't be built.
    """
    changes = dict(section.config)
    if vocab_size is not None and section.from_config is None:
        changes.setdefault("vocab_size", vocab_size)
    for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
        changes.setdefault(special, None)  # they belong to the tokenizer, which export sets
    try:
        if section.from_config is not None:
            config = AutoConfig.from_pretrained(section.from_config, **changes)
        else:
            config = AutoConfig.for_model(section.type, **changes)
    except OSError as error:
        raise ModelError(
            f"model.from_config={section.from_config!r} can't be read ({first_line(error)}); give a folder with config.json"
        ) from error
    except StrictDataclassError as error:  # its first line names the validator, the rest what is wrong
        reason = " ".join(str(error).partition("\n")[2].split()).partition(": ")[2]
        if wrong := WRONG_KIND.fullmatch(reason):
            name, kind = wrong["name"], wrong["kind"]
            given = json.dumps(section.config.get(name), default=str)
            raise ModelError(f"model.config.{name} is {given}, expected {kind}") from error
        raise ModelError(f"model.config does not make a {section.type} model: {reason}") from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"model: {section.type!r} can't be built from model.config: {first_line(error)}") from error
    _check_equal_layers(config)
    return config


def _check_equal_layers(config: PretrainedConfig) -> None:
    """Raise ModelError for a model whose layers differ in keys of which this package needs one value for all layers. Reading such
    a key is an error in transformers."""
    per_layer = getattr(config, "per_layer_attributes", None) or ()  # transformers before 5.23 may not have it
    if differing := [key for key in EQUAL_IN_ALL_LAYERS if key in per_layer]:
        raise ModelError(
            f"model: the layers of {config.model_type} differ in {differing[0]}, expected equal layers; choose another model"
        )


def build(config: PretrainedConfig, loss_chunk: int, separator: int | None = None) -> LanguageModel:
    """Build the model with its weights on the meta device and real buffers. See `LanguageModel` for the arguments.

    Raises ModelError for a model that can't be built, has experts, changes its logits or can't separate documents.
    """
    from accelerate import init_empty_weights

    for key in LOGIT_CHANGING_KEYS:
        if getattr(config, key, None) not in (None, 1.0):
            raise ModelError(
                f"model.config.{key}={getattr(config, key)} changes the logits, which llmtrain's loss does not support; choose "
                "another model"
            )
    is_masked = (
        config.model_type not in IGNORE_POSITIONS and {*(getattr(config, "layer_types", None) or ())} <= MASKED_LAYERS
    )
    if separator is not None and not is_masked:
        raise ModelError(
            f"train.document_mask: transformers does not separate documents in models of type {config.model_type}; leave it out, or "
            "give data.packing=none"
        )
    attention = {"attn_implementation": UNMASKED} if config.model_type in CAUSAL_FAMILIES else {}
    try:
        _check_depth(config)
        _check_dense(config)
        with init_empty_weights(include_buffers=False):
            causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
    except ModelError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        # AssertionError: torch asserts that pad_token_id is in the vocabulary.
        raise ModelError(f"model: transformers can't build {config.model_type!r}: {first_line(error)}") from error
    model = LanguageModel(causal_lm, loss_chunk, separator)
    if config.tie_word_embeddings:
        causal_lm.tie_weights()
    return model


def _check_depth(config: PretrainedConfig) -> None:
    """Raise ModelError for a model that skips layers at random, because ranks would then gather and average different layers."""
    if layerdrop := getattr(config, "layerdrop", None):
        raise ModelError(
            f"model: layerdrop is {layerdrop:g}, with which each rank would skip different layers; set it to 0"
        )


def _check_dense(config: PretrainedConfig) -> None:
    """Raise ModelError for a mixture of experts, because this package's loss has no term that balances experts."""
    if "expert" not in str(config.to_dict()):
        return
    # Not with `init_empty_weights`, which briefly allocates each weight: all experts of a layer are one weight.
    with torch.device("meta"):
        modules = AutoModelForCausalLM.from_config(config).modules()
    kinds = (type(module).__name__ for module in modules)
    experts = next((kind for kind in kinds if "Experts" in kind or "MoE" in kind), None)
    if experts is not None:
        raise ModelError(
            f"model: {config.model_type} is a mixture of experts ({experts}), and only dense models can be trained; choose one"
        )


def blocks_of(model: LanguageModel) -> list[ModelBlock]:
    """Return the blocks: embedding, each layer, and final norm with head.

    If head and embedding share their weight, the head and the final norm are in the embedding's block. Raises
    ModelError if the list of layers is not found, or if a parameter belongs to no block.
    """
    base = model.causal_lm.base_model
    config = model.causal_lm.config
    children = [
        child for child in base.children() if isinstance(child, nn.ModuleList) or any(True for _ in child.parameters())
    ]
    is_layers = [isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers for child in children]
    if True not in is_layers:
        raise ModelError(
            f"model: {type(base).__name__} has no list of {config.num_hidden_layers} layers; choose a decoder-only model"
        )
    at = is_layers.index(True)
    before, layers, after = children[:at], children[at], children[at + 1 :]
    head = model.causal_lm.get_output_embeddings()
    named_layers = [ModelBlock(f"layer {i}", [layer]) for i, layer in enumerate(layers)]
    if head.weight is model.causal_lm.get_input_embeddings().weight:
        blocks = [ModelBlock("embedding and head", [*before, *after, head]), *named_layers]
    else:
        blocks = [ModelBlock("embedding", before), *named_layers, ModelBlock("head", [*after, head])]
    inside = {id(parameter) for block in blocks for module in block.modules for parameter in module.parameters()}
    outside = next((name for name, parameter in model.named_parameters() if id(parameter) not in inside), None)
    if outside is not None:
        raise ModelError(
            f"model: {outside.removeprefix(PREFIX)} is not in the base model, nor in its output head; choose another model"
        )
    return blocks


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (full name, owning module, name in that module, parameter). A shared parameter is yielded once per name."""
    for path, owner in model.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield (f"{path}.{name}" if path else name), owner, name, parameter


def initialize(
    model: LanguageModel,
    block: ModelBlock,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    read: ReadWeight | None = None,
) -> None:
    """Give the block's meta parameters their initial values: those that `read` returns, or random ones.

    Random matrices and embeddings are drawn from a normal distribution with standard deviation `initializer_range`, or less for
    `SCALED_RESIDUALS`. Biases are 0, and norms get the weight that preserves unit variance. Values are drawn on the CPU, so that
    every device starts from the same numbers. Raises ModelError for a parameter that has no known initial value.
    """
    config = model.causal_lm.config
    std = getattr(config, "initializer_range", None) or 0.02
    std_of_projections = std / math.sqrt(2 * config.num_hidden_layers) if config.model_type in SCALED_RESIDUALS else std
    inside = {id(module) for top in block.modules for module in top.modules()}
    named = [one for one in named_weights(model) if id(one[1]) in inside and one[3].is_meta]
    wanted: dict[int, tuple[str, nn.Module, str, nn.Parameter]] = {}
    for one in named:
        wanted.setdefault(id(one[3]), one)  # the first name of a shared parameter

    def draw(name: str, owner: nn.Module, shape: torch.Size) -> torch.Tensor:
        # The label is part of the seed: another spelling would give other weights.
        generator = torch.Generator().manual_seed(derive_seed(seed, "initialisation", name))
        is_projection = name.endswith("c_proj.weight")
        deviation = std_of_projections if is_projection else std
        value = torch.empty(shape).normal_(0.0, deviation, generator=generator)
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            value[owner.padding_idx] = 0
        return value

    done: dict[int, nn.Parameter] = {}
    # Each weight has its own generator, so several threads draw the same values as a single one, which would take
    # seconds per billion values.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = {
            at: pool.submit(draw, name, owner, parameter.shape)
            for at, (name, owner, key, parameter) in wanted.items()
            if read is None and key != "bias" and isinstance(owner, RANDOMLY_INITIALIZED)
        }
        for at, (name, owner, key, parameter) in wanted.items():
            if read is not None:
                value = read(name.removeprefix(PREFIX))
            elif at in drawn:
                value = drawn.pop(at).result()
            else:
                value = torch.zeros(parameter.shape) if key == "bias" else _norm_weight(owner, parameter.shape, name)
            value = value.to(device=device, dtype=dtype)
            done[at] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for _, owner, key, parameter in named:
        setattr(owner, key, done[id(parameter)])


def placeholders(model: LanguageModel) -> ReadWeight:
    """Return a `read` function that returns zeros, for a model whose weights a checkpoint is about to replace."""
    shapes = {name.removeprefix(PREFIX): parameter.shape for name, _, _, parameter in named_weights(model)}
    return lambda name: torch.zeros(shapes[name])


def check_initial_values(model: LanguageModel) -> None:
    """Raise ModelError, as `initialize` does, for a parameter that has no known initial value. Draws no weights."""
    checked = set()
    for name, owner, key, parameter in named_weights(model):
        kind = type(owner), key, parameter.shape
        if key != "bias" and not isinstance(owner, RANDOMLY_INITIALIZED) and kind not in checked:
            _norm_weight(owner, parameter.shape, name)
            checked.add(kind)


def _norm_weight(owner: nn.Module, shape: torch.Size, name: str) -> torch.Tensor:
    if type(owner).__name__.endswith(("LayerNorm", "RMSNorm")) and len(shape) == 1:
        return _identity_norm_weight(owner, shape)
    raise ModelError(
        f"model: no initialization is known for {name} of {type(owner).__name__}; choose a model of linear layers, embeddings and norms"
    )


def _identity_norm_weight(norm: nn.Module, shape: torch.Size) -> torch.Tensor:
    """Return the weight that preserves unit variance: ones, or zeros for norms that scale by 1 + weight."""
    x = torch.randn((8, *shape), generator=torch.Generator().manual_seed(0))
    for value in (torch.ones(shape), torch.zeros(shape)):
        parameters = {key: value if key == "weight" else torch.zeros(p.shape) for key, p in norm.named_parameters()}
        if abs(torch.func.functional_call(norm, parameters, (x,)).pow(2).mean().item() - 1) < 0.1:
            return value
    raise ModelError(f"model: no initial weight makes {type(norm).__name__} keep unit variance; choose another model")


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(model: LanguageModel, sequence_length: float) -> float:
    """Return the floating-point operations of forward and backward per token (arXiv 2204.02311, appendix B, PaLM).

    They are 6 per weight that takes part in a matrix product (all but embeddings that are only looked up), and 12 x layers x
    heads x head size x T for attention, where T is `sequence_length`. Recomputed activations are not counted.
    """
    causal_lm, config = model.causal_lm, model.causal_lm.config
    looked_up = {id(m.weight): m.weight.numel() for m in causal_lm.modules() if isinstance(m, nn.Embedding)}
    looked_up.pop(id(causal_lm.get_output_embeddings().weight), None)
    multiplying = count_parameters(model) - sum(looked_up.values())
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)  # Qwen3's is not the hidden size
    return 6.0 * multiplying + 12.0 * config.num_hidden_layers * width * sequence_length
