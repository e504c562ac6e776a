"""Tests of models from transformers configs: losses, initial values, blocks in forward order, and what is refused."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, OPTConfig, T5Config

from llmtrain.config import ModelSection, ParallelSection
from llmtrain.errors import ModelError
from llmtrain.model import (
    LanguageModel,
    blocks_of,
    build,
    count_parameters,
    flops_per_token,
    initialize,
    model_config,
    named_weights,
    placeholders,
)
from llmtrain.parallel import wrapping
from llmtrain.parallel.wrapping import wrap_layers
from llmtrain.seeding import derive_seed

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
}
CPU = torch.device("cpu")


def materialized(section: ModelSection, seed: int = 1, dtype: torch.dtype = torch.float32):
    model = build(model_config(section, vocab_size=97), loss_chunk=7)
    for block in blocks_of(model):
        initialize(model, block, seed, CPU, dtype)
    return model


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(type="llama", config=LLAMA),
        ModelSection(type="llama", config={**LLAMA, "tie_word_embeddings": True}),
        ModelSection(type="gpt_neo", config=NEO),
        ModelSection(type="qwen3", config={**LLAMA, "head_dim": 8, "num_key_value_heads": 2}),
        ModelSection(type="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ModelSection(type="gemma", config={**LLAMA, "head_dim": 8, "num_key_value_heads": 1}),
    ],
    ids=["llama", "llama-tied", "gpt_neo", "qwen3", "gpt2", "gemma"],
)
def test_loss_is_that_of_transformers(section):
    """A model that is built on meta and materialized block by block equals a plain transformers model with the same weights."""
    model = materialized(section).eval()
    theirs = AutoModelForCausalLM.from_config(model.causal_lm.config, dtype=torch.float32).eval()
    missing, unexpected = theirs.load_state_dict(model.causal_lm.state_dict(), strict=False)
    assert not unexpected and all("bias" in name or "inv_freq" in name for name in missing)
    tokens = torch.randint(0, 97, (2, 21), generator=torch.Generator().manual_seed(0))
    ours = model(tokens[:, :-1], tokens[:, 1:])
    logits = theirs(input_ids=tokens[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
    assert abs(ours.item() / 40 - torch.log(torch.tensor(97.0)).item()) < 0.1, "a fresh model should be near uniform"


@pytest.mark.parametrize(
    "kind",
    [
        ModelSection(type="llama", config=LLAMA),
        ModelSection(type="gpt_neo", config=NEO),
        ModelSection(type="gpt2", config={"n_embd": 32, "n_layer": 4, "n_head": 4}),
    ],
    ids=lambda section: section.type,
)
def test_initial_values_have_the_statistics_of_transformers(kind):
    ours = dict(materialized(kind).causal_lm.named_parameters())
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(model_config(kind, vocab_size=97), dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        assert ours[name].shape == parameter.shape
        torch.testing.assert_close(ours[name].mean(), parameter.mean(), rtol=0.05, atol=0.003)
        torch.testing.assert_close(ours[name].std(), parameter.std(), rtol=0.15, atol=1e-6)


def test_initial_values_come_from_seed_and_name():
    first, again, other = (materialized(ModelSection(config=LLAMA), seed) for seed in (1, 1, 2))
    q0, q1 = (f"causal_lm.model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    assert torch.equal(first.get_parameter(q0), again.get_parameter(q0))
    assert not torch.equal(first.get_parameter(q0), other.get_parameter(q0))
    assert not torch.equal(first.get_parameter(q0), first.get_parameter(q1))


def test_threads_draw_the_values_of_one_thread(monkeypatch):
    """Each parameter has a generator of its own, whichever thread draws it. The barrier makes two threads draw at a time."""
    section = ModelSection(config=LLAMA)
    alone = dict(materialized(section).named_parameters())
    both, normal = threading.Barrier(2, timeout=60), torch.Tensor.normal_

    def together(value, *given, **named):
        if value.shape == (64, 32) and not value.is_meta:  # gate_proj and up_proj
            both.wait()
        return normal(value, *given, **named)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        monkeypatch.setattr(torch.Tensor, "normal_", together)
        drawn = dict(materialized(section).named_parameters())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(value, drawn[name]) for name, value in alone.items())
    up = "causal_lm.model.layers.0.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(derive_seed(1, "initialisation", up))
    assert torch.equal(drawn[up], normal(torch.empty(64, 32), 0.0, 0.02, generator=generator))


def test_blocks_hold_every_weight_once_in_forward_order():
    model = build(model_config(ModelSection(config=LLAMA), 97), 64)
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["embedding", "layer 0", "layer 1", "layer 2", "head"]
    owners = [id(module) for block in blocks for top in block.modules for module in top.modules()]
    assert len(owners) == len(set(owners))
    assert {id(owner) for _, owner, _, _ in named_weights(model)} <= set(owners)


def test_a_tied_head_joins_the_embedding_and_counts_once():
    tied = build(model_config(ModelSection(type="gpt_neo", config=NEO), 97), 64)
    assert [block.name for block in blocks_of(tied)] == ["embedding and head", "layer 0", "layer 1"]
    untied = build(model_config(ModelSection(type="gpt_neo", config={**NEO, "tie_word_embeddings": False}), 97), 64)
    assert count_parameters(untied) - count_parameters(tied) == 97 * 32


def test_gpt_neo_8m_has_the_published_number_of_parameters():
    config = {
        "hidden_size": 128,
        "num_layers": 8,
        "num_heads": 8,
        "attention_types": [[["global", "local"], 4]],
        "max_position_embeddings": 300,
    }
    assert count_parameters(build(model_config(ModelSection(type="gpt_neo", config=config), 50257), 64)) == 8_054_656


def test_a_tied_head_is_drawn_as_the_embedding():
    tied, untied = (materialized(ModelSection(config={**LLAMA, "tie_word_embeddings": tie})) for tie in (True, False))
    name = "causal_lm.model.embed_tokens.weight"
    assert torch.equal(tied.get_parameter(name), untied.get_parameter(name))
    assert tied.causal_lm.lm_head.weight is tied.get_parameter(name)


def test_flops_leave_out_embedding_look_ups():
    model = build(model_config(ModelSection(config=LLAMA), 97), 64)
    expected = 6 * (count_parameters(model) - 97 * 32) + 12 * 3 * 32 * 16
    assert flops_per_token(model, sequence_length=16) == expected


def test_flops_of_attention_count_heads_that_are_wider_together_than_the_model() -> None:
    attention = []
    for size in (8, 16):
        model = build(model_config(ModelSection(config=LLAMA | {"head_dim": size}), 97), 64)
        attention.append(flops_per_token(model, sequence_length=16) - flops_per_token(model, sequence_length=0))
    assert attention[1] == 2 * attention[0] == 12 * 3 * 64 * 16


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(type="gemma2", config=LLAMA), "final_logit_softcapping"),
        (ModelSection(type="no_such_model"), "no_such_model"),
        (ModelSection(from_config="/no/such/folder"), "model.from_config"),
        (ModelSection(type="doge", config=LLAMA), "no initialization is known"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(section, message):
    with pytest.raises(ModelError, match=message) as caught:
        materialized(section)
    assert "\n" not in str(caught.value)


def test_only_one_block_is_materialized_at_a_time():
    model = build(model_config(ModelSection(config=LLAMA), 97), 64)
    assert all(p.is_meta for p in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    initialize(model, blocks_of(model)[1], 0, CPU, torch.float32)
    real = {name for name, p in model.named_parameters() if not p.is_meta}
    assert real and all(".layers.0." in name for name in real)


class TripledRMSNorm(torch.nn.Module):
    """Norm whose output has unit variance for no value of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(32, device="meta"))

    def forward(self, x):
        return 3 * (1 + self.weight.abs()) * x


def without_a_linear_head(config):
    causal_lm = AutoModelForCausalLM.from_config(config)
    causal_lm.set_output_embeddings(torch.nn.Sequential(causal_lm.get_output_embeddings()))
    return LanguageModel(causal_lm, 64)


def with_a_strange_norm(config):
    model = build(config, 64)
    model.causal_lm.base_model.norm = TripledRMSNorm()
    for block in blocks_of(model):
        initialize(model, block, 1, CPU, torch.float32)


@pytest.mark.parametrize(
    ("do", "config", "message"),
    [
        (without_a_linear_head, LlamaConfig(**LLAMA, vocab_size=97), "LlamaForCausalLM has no linear output head"),
        (with_a_strange_norm, LlamaConfig(**LLAMA, vocab_size=97), "no initial weight makes TripledRMSNorm keep"),
        (lambda config: build(config, 64), T5Config(), "transformers can't build 't5': Unrecognized configuration"),
        (
            lambda config: build(config, 64),
            LlamaConfig(**LLAMA, vocab_size=97, pad_token_id=97),
            "can't build 'llama': Padding",
        ),
        (
            lambda config: blocks_of(build(config, 64)),
            OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32),
            "OPTModel has no list of 3 layers; choose a decoder-only model",
        ),
    ],
    ids=[
        "no linear head",
        "a strange norm",
        "an encoder-decoder",
        "padding beyond the vocabulary",
        "layers deep inside",
    ],
)
def test_a_model_of_another_shape_is_refused_in_one_line(do, config, message):
    with pytest.raises(ModelError, match=message) as caught:
        do(config)
    assert "\n" not in str(caught.value)


def test_an_error_of_transformers_without_a_message_is_named_by_its_kind(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fail)
    with pytest.raises(ModelError, match="transformers can't build 'llama': AssertionError"):
        build(LlamaConfig(**LLAMA, vocab_size=97), 64)


def test_the_row_of_padding_begins_and_stays_at_zero():
    embedding = materialized(ModelSection(config={**LLAMA, "pad_token_id": 5})).causal_lm.get_input_embeddings()
    assert embedding.padding_idx == 5
    assert embedding.weight.ne(0).any(dim=1).tolist() == [row != 5 for row in range(97)]


@pytest.mark.parametrize("kept", [False, True])
def test_a_layer_keeps_its_forward_unless_there_is_something_to_wrap(kept):
    model = materialized(ModelSection(config=LLAMA))
    wrap_layers(blocks_of(model), ParallelSection(activation_checkpointing=not kept))
    layers = [layer for block in blocks_of(model) if block.name.startswith("layer") for layer in block.modules]
    assert len(layers) == 3 and all(("forward" in vars(layer)) != kept for layer in layers)


def test_documents_that_a_model_type_cannot_separate_are_refused():
    config = model_config(ModelSection(type="bloom", config={"hidden_size": 32, "n_layer": 2, "n_head": 4}), 97)
    build(config, loss_chunk=7)
    with pytest.raises(ModelError, match=r"train\.document_mask: transformers does not separate documents in .* bloom"):
        build(config, loss_chunk=7, separator=0)
    with_a_state = LlamaConfig(**LLAMA, vocab_size=97)
    with_a_state.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"train\.document_mask: .* type llama"):
        build(with_a_state, loss_chunk=7, separator=0)


def test_a_parameter_outside_of_all_blocks_is_refused():
    """Such a parameter would neither be trained nor stored."""
    model = build(model_config(ModelSection(config=LLAMA), 97), 64)
    model.causal_lm.between = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"between\.weight is not in the base model, nor in its output head"):
        blocks_of(model)


EXPERTS = {**LLAMA, "num_key_value_heads": 2, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "config", "experts"),
    [
        ("mixtral", {**EXPERTS, "num_local_experts": 4}, "MixtralExperts"),
        ("qwen3_moe", {**EXPERTS, "num_experts": 4}, "Qwen3MoeExperts"),
        ("doge", {**EXPERTS, "num_experts": 16, "is_moe": True}, "DogeCDMoE"),
        ("deepseek_v3", {}, "DeepseekV3MoE"),
    ],
)
def test_experts_are_refused_before_memory_is_allocated(kind, config, experts, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a weight would be allocated")

    monkeypatch.setattr("accelerate.init_empty_weights", fail)
    with pytest.raises(ModelError) as refused:
        build(model_config(ModelSection(type=kind, config=config), 97), 64)
    assert str(refused.value) == (
        f"model: {kind} is a mixture of experts ({experts}), and only dense models can be trained; choose one"
    )


@pytest.mark.parametrize(("kind", "key"), [("doge", "is_moe"), ("qwen2_moe", "num_experts")])
def test_a_dense_model_of_a_type_that_can_have_experts_is_built(kind, key):
    config = model_config(ModelSection(type=kind, config={**EXPERTS, key: 0 if key == "num_experts" else False}), 97)
    assert len(blocks_of(build(config, 64))) == 5


@pytest.mark.parametrize("kind", ["biogpt", "xglm"])
def test_layers_that_are_skipped_at_random_are_refused(kind):
    with pytest.raises(
        ModelError, match=r"layerdrop is 0\.1, with which each rank would skip different layers; set it to 0"
    ):
        build(model_config(ModelSection(type=kind, config={"layerdrop": 0.1}), 97), 64)


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
def test_a_model_whose_layers_have_heads_of_different_sizes_is_refused(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    with pytest.raises(ModelError, match=rf"^model: the layers of {kind} differ in head_dim, .* choose another model$"):
        model_config(ModelSection(type=kind), 97)


def test_an_error_within_transformers_is_one_line():
    """DBRX's config lacks a value that its layers read."""
    with pytest.raises(ModelError, match=r"transformers can't build 'dbrx': .*rope_theta"):
        build(model_config(ModelSection(type="dbrx"), 97), 64)


def test_a_run_that_continues_needs_no_initial_values():
    section = ModelSection(type="doge", config=LLAMA)
    model = build(model_config(section, 97), 64)
    for block in blocks_of(model):
        initialize(model, block, 0, torch.device("cpu"), torch.float32, placeholders(model))
    assert not any(parameter.is_meta or parameter.any() for parameter in model.parameters())


def test_selective_checkpointing_computes_attention_with_dropout_again():
    """If its output were kept, it would not advance the random numbers, and later dropouts would draw other masks than before."""
    attention = SimpleNamespace(overloadpacket=SimpleNamespace(__name__="_scaled_dot_product_efficient_attention"))
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    qkv = [torch.zeros(1)] * 3
    for arguments, named, expected in (
        ((*qkv, None, True), {}, keep),
        ((*qkv, None, True, 0.0, True), {"scale": 0.5}, keep),
        ((*qkv, None, True, 0.1, True), {}, again),
        ((*qkv, None, True), {"dropout_p": 0.1}, again),
    ):
        assert wrapping._checkpoint_policy(None, attention, *arguments, **named) == expected
