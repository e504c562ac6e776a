"""Memory that the plan estimates, compared with counts by hand. `test_plan_activations` measures what layers save."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from llmtrain.config import OverlappedSection, Recipe, StepsSection
from llmtrain.errors import ModelError
from llmtrain.plan import memory
from llmtrain.plan.memory import (
    KEPT_SHARE,
    SAVED_PER_COMPILED_LINEAR,
    SAVED_PER_LINEAR,
    checkpoint_bytes,
    estimate,
    reshards,
)
from llmtrain.plan.mesh_plan import with_reshard_after_forward_decided
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.recipe_loader import load_recipe

VOCABULARY, HIDDEN, INNER, LAYERS = 100, 8, 20, 3
ATTENTION, MLP, NORMS = 4 * HIDDEN * HIDDEN, 3 * HIDDEN * INNER, 2 * HIDDEN
LAYER = ATTENTION + MLP + NORMS
EMBEDDING = VOCABULARY * HIDDEN
SAVED = SAVED_PER_LINEAR["fused"]["bf16"]
LLAMA = (
    "{type: llama, config: {hidden_size: 8, intermediate_size: 20, num_hidden_layers: 3, num_attention_heads: 2, "
    "max_position_embeddings: 32}}"
)

GPT_NEO = (
    "{type: gpt_neo, config: {hidden_size: 8, num_layers: 3, num_heads: 2, window_size: 8, max_position_embeddings: 32, "
    "attention_types: [[[global, local, global], 1]]}}"
)


def make(tmp_path, *overrides: str, model: str = LLAMA) -> Recipe:
    path = tmp_path / "small.yaml"
    path.write_text(
        f"model: {model}\n"
        "data: {tokenizer: 'train:100'}\n"
        "train: {steps: 1000, sequence_length: 16, global_batch: 8, micro_batch: 2}\n"
        "sync: {method: diloco, period: {kind: steps, every: 10}}\n"
        "parallel: {reshard_after_forward: true}\n"
    )
    return load_recipe(path, overrides)


def planned(tmp_path, *overrides: str, replicas: int = 1, shard: int = 1):
    recipe = make(tmp_path, *overrides)
    return estimate(recipe, size_of(recipe), replicas, shard)


def test_untied_llama_by_hand(tmp_path) -> None:
    size = size_of(make(tmp_path))
    assert size.block_parameters == (EMBEDDING, LAYER, LAYER, LAYER, HIDDEN + EMBEDDING)
    assert size.parameters == sum(size.block_parameters)
    assert size.embedding_parameters == EMBEDDING
    assert (size.vocabulary, size.hidden, size.layers, size.unfused_heads) == (VOCABULARY, HIDDEN, LAYERS, 0)
    assert size.linear_features == 4 * (HIDDEN + HIDDEN) + 3 * (HIDDEN + INNER)


def test_a_tied_head_counts_once(tmp_path) -> None:
    size = size_of(make(tmp_path, "model.config.tie_word_embeddings=true"))
    assert size.block_parameters == (EMBEDDING + HIDDEN, LAYER, LAYER, LAYER)
    assert size.parameters == EMBEDDING + HIDDEN + LAYERS * LAYER


def test_gpt_neo_keeps_more_between_its_linear_layers(tmp_path) -> None:
    model = "{type: gpt_neo, config: {hidden_size: 8, num_layers: 2, num_heads: 4, attention_types: [[[global, local], 1]]}}"
    recipe = make(tmp_path, model=model)
    size = size_of(recipe)
    assert (size.attention, size.unfused_heads) == ("gpt_neo", 0)
    assert estimate(recipe, size, 1, 1).activations == pytest.approx(
        (2 + 1 / 4) * SAVED_PER_LINEAR["gpt_neo"]["bf16"] * 2 * (2 * 16) * size.linear_features, abs=2
    )


def test_an_attention_that_is_not_fused_keeps_its_weights(tmp_path) -> None:
    recipe = make(tmp_path, model="{type: gptj, config: {n_embd: 8, n_layer: 2, n_head: 4, rotary_dim: 2}}")
    size = size_of(recipe)
    assert (size.attention, size.unfused_heads) == ("not fused", 4)
    # both layers and a quarter of one for gradients, with 6 bytes per attention weight: heads x tokens x sequence
    linear = SAVED_PER_LINEAR["not fused"]["bf16"] * 2 * (2 * 16) * size.linear_features
    assert estimate(recipe, size, 1, 1).activations == pytest.approx(
        (2 + 1 / 4) * (6 * 4 * (2 * 16) * 16 + linear), abs=2
    )


def test_vocabulary_from_recipe_tokenizer_or_argument(tmp_path) -> None:
    assert size_of(make(tmp_path, "model.config.vocab_size=128")).vocabulary == 128
    assert size_of(make(tmp_path, "data.tokenizer=gpt2")).vocabulary == 50257
    assert size_of(make(tmp_path, "data.tokenizer=some/tokenizer"), vocab_size=77).vocabulary == 77


def test_a_folder_with_a_tokenizer_tells_its_vocabulary(tmp_path) -> None:
    letters = {letter: number for number, letter in enumerate([*"abcdefg", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "letters")
    assert size_of(make(tmp_path, f"data.tokenizer={tmp_path / 'letters'}")).vocabulary == 8


def test_unknown_vocabulary_says_what_to_give(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"some/tokenizer.*model\.config\.vocab_size"):
        size_of(make(tmp_path, "data.tokenizer=some/tokenizer"))


def test_bytes_of_one_rank_alone(tmp_path) -> None:
    recipe = make(tmp_path)
    size = size_of(recipe)
    memory = estimate(recipe, size, 1, 1)
    p = size.parameters
    assert (memory.weights, memory.gradients, memory.optimizer, memory.anchors) == (6 * p, 4 * p, 8 * p, 8 * p)
    layer = SAVED * 2 * 32 * size.linear_features
    assert memory.activations == pytest.approx((LAYERS + 1 / 4) * layer, abs=2)
    # One chunk has all 32 tokens. Its logits, in bf16 and twice in fp32, need more than gradients of logits and head in
    # bf16. The head's gradient in fp32 and that of its inputs in bf16 are added.
    assert memory.loss == (2 + 2 * 4) * 32 * VOCABULARY + 4 * EMBEDDING + 2 * 32 * HIDDEN
    assert memory.host == 0


def test_a_large_vocabularys_gradient_is_larger_than_its_logits(tmp_path) -> None:
    memory = planned(tmp_path, "parallel.loss_chunk=1")
    assert memory.loss == 2 * (VOCABULARY + EMBEDDING) + 4 * EMBEDDING + 2 * 32 * HIDDEN


def most(tmp_path, *overrides: str, shard: int = 1) -> int:
    """Return the peak bytes of a step with one micro-batch, without the parts that stay."""
    memory = planned(tmp_path, f"train.global_batch={2 * shard}", *overrides, shard=shard)
    return memory.device_total - memory.weights - memory.optimizer - memory.anchors


OF_LAYER = SAVED * 2 * 32 * 148  # bytes that a layer saves for backward, in bf16
IN_WORK = (2 + 4) * 808  # gradients of the head, the largest block, in bf16 and fp32
FORWARD = 2 * (808 + 800)  # if sharded, the two largest blocks in bf16: head and embedding
SHARDED = 4 * 3864 / 2  # masters or gradients on each of two ranks


def test_most_is_there_at_the_end_of_forward(tmp_path) -> None:
    loss = planned(tmp_path).loss
    assert most(tmp_path) == pytest.approx(LAYERS * OF_LAYER + loss, abs=LAYERS)
    accumulating = planned(tmp_path).device_total - planned(tmp_path, "train.global_batch=2").device_total
    assert accumulating == 4 * 3864  # all gradients of earlier micro-batches are there already


def test_gathered_blocks_are_there_at_the_end_of_forward_and_in_backward(tmp_path) -> None:
    loss = planned(tmp_path).loss
    assert most(tmp_path, shard=2) == pytest.approx(LAYERS * OF_LAYER + FORWARD + loss, abs=LAYERS)
    backward = most(tmp_path, "parallel.loss_chunk=1", shard=2)
    assert backward == pytest.approx((LAYERS + 1 / 4) * OF_LAYER + FORWARD + IN_WORK, abs=LAYERS)
    recomputing = most(tmp_path, "parallel.loss_chunk=1", "parallel.activation_checkpointing=true", shard=2)
    gradients = SHARDED - 4 * 808 / 2
    expected = gradients + 2 * 32 * HIDDEN + 1.25 * OF_LAYER + FORWARD + IN_WORK
    assert recomputing == pytest.approx(expected, abs=2)


def test_gradients_in_bf16_are_added_to_earlier_ones_without_a_copy(tmp_path) -> None:
    def in_backward(precision: str, batch: int) -> float:
        return planned(tmp_path, f"parallel.precision={precision}", f"train.global_batch={batch}").gathered / 808

    assert (in_backward("fp32", 2), in_backward("fp32", 4)) == (4, 4)
    assert (in_backward("bf16", 2), in_backward("bf16", 4)) == (2 + 4, 2)


def test_most_is_there_when_backward_begins_if_the_loss_needs_little(tmp_path) -> None:
    found = most(tmp_path, "parallel.loss_chunk=1")
    assert found == pytest.approx((LAYERS + 1 / 4) * OF_LAYER + IN_WORK, abs=LAYERS)


def test_most_is_there_when_backward_ends_if_layers_are_checkpointed(tmp_path) -> None:
    found = most(tmp_path, "parallel.loss_chunk=1", "parallel.activation_checkpointing=true")
    gradients = 4 * (3864 - 808)  # of all blocks but the one in IN_WORK
    assert found == pytest.approx(gradients + 2 * 32 * HIDDEN + 1.25 * OF_LAYER + IN_WORK, abs=2)


def test_most_is_there_in_a_synchronization_within_forward(tmp_path) -> None:
    messages = 5 * 4 * 808
    found = most(tmp_path, "parallel.loss_chunk=1", "sync.schedule=layerwise")
    assert found == pytest.approx(LAYERS * OF_LAYER + messages, abs=LAYERS)
    blocking = planned(tmp_path, "parallel.loss_chunk=1").messages
    assert blocking == messages and most(tmp_path, "parallel.loss_chunk=1") < found


def test_sharding_divides_what_is_sharded(tmp_path) -> None:
    whole, quarter = (planned(tmp_path, f"train.global_batch={2 * shard}", shard=shard) for shard in (2, 8))
    for part in ("weights", "gradients", "optimizer", "anchors"):
        assert getattr(quarter, part) == pytest.approx(getattr(whole, part) / 4, abs=8), part
    for part in ("gathered", "activations", "loss"):
        assert getattr(quarter, part) == getattr(whole, part), part


def test_accumulated_gradients_are_sharded(tmp_path) -> None:
    once, twice = (planned(tmp_path, f"train.global_batch={batch}", shard=4) for batch in (8, 16))
    assert twice.gradients == once.gradients
    assert (
        twice.device_total - once.device_total == 3864
    )  # a quarter of 4 bytes per parameter, from the second micro-batch on


def test_parameters_that_stay_gathered_take_memory(tmp_path) -> None:
    """All 3864 parameters are in memory in bf16 instead of the two largest blocks, of 808 and 800."""
    freed, kept = (planned(tmp_path, f"parallel.reshard_after_forward={value}", shard=4) for value in ("true", "false"))
    assert kept.gathered - freed.gathered == 2 * (3864 - 808 - 800)
    assert kept.device_total - freed.device_total <= 2 * (3864 - 808 - 800)


@pytest.mark.parametrize(("allowed", "frees"), [(2 * 3864, False), (2 * 3864 - 1, True)])
def test_parameters_stay_gathered_where_they_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path, allowed: int, frees: bool
) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", allowed)
    recipe = make(tmp_path, "train.micro_batch=1", "train.global_batch=4", "parallel.reshard_after_forward=auto")
    assert reshards(recipe, size_of(recipe), 1, 4) is frees
    assert KEPT_SHARE * estimate(recipe, size_of(recipe), 1, 4).device_total < 2 * 3864, "more than KEPT_SHARE"


def test_parameters_stay_gathered_where_they_add_little(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """All parameters in bf16 take 7,728 bytes: more than a tenth of what one short sequence needs, less than a tenth of what
    many need."""
    monkeypatch.setattr(memory, "KEPT_BYTES", 0)
    for sequences, stays in ((1, False), (64, True)):
        keys = [f"train.micro_batch={sequences}", "train.global_batch=256", "parallel.reshard_after_forward=auto"]
        freed = planned(tmp_path, *keys, "parallel.reshard_after_forward=true", shard=4)
        assert (KEPT_SHARE * freed.device_total >= 2 * 3864) is stays, "the cases are as the docstring says"
        recipe = make(tmp_path, *keys)
        assert reshards(recipe, size_of(recipe), 1, 4) is not stays
        decided = with_reshard_after_forward_decided(recipe, 100, 1, 4).reshard_after_forward
        assert decided is not stays
        same = planned(tmp_path, *keys, f"parallel.reshard_after_forward={str(decided).lower()}", shard=4)
        assert planned(tmp_path, *keys, shard=4) == same


def test_a_given_policy_is_kept(tmp_path) -> None:
    for value in (True, False):
        recipe = make(tmp_path, f"parallel.reshard_after_forward={value}")
        assert with_reshard_after_forward_decided(recipe, 100, 1, 4).reshard_after_forward is value
    automatic = "parallel.reshard_after_forward=auto"
    alone, zero = make(tmp_path, automatic), make(tmp_path, automatic, "parallel.engine=zero")
    assert with_reshard_after_forward_decided(alone, 100, 4, 1).reshard_after_forward == "auto", (
        "there is nothing to decide"
    )
    assert with_reshard_after_forward_decided(zero, 100, 1, 4).reshard_after_forward == "auto"


def test_compiled_layers_keep_less(tmp_path) -> None:
    plain, compiled = (planned(tmp_path, f"parallel.compile={value}") for value in ("false", "true"))
    of_layers = SAVED_PER_COMPILED_LINEAR["fused"] / SAVED
    assert compiled.activations / plain.activations == pytest.approx(of_layers, rel=1e-3)


def test_offload_moves_anchors_to_the_host(tmp_path) -> None:
    here, there = planned(tmp_path), planned(tmp_path, "sync.offload=true")
    assert here.anchors > 0
    assert (there.anchors, there.host) == (0, here.anchors)
    assert there.device_total < here.device_total


def test_torch_pins_the_next_power_of_two(tmp_path) -> None:
    """Half of a block of 800, 752 or 808 values of 4 bytes takes 2048 bytes, for the anchor and for the momentum."""
    there = planned(tmp_path, "sync.offload=true", shard=2)
    assert there.host == 2 * 4 * 3864 / 2
    assert there.pinned_total == 2 * 5 * 2048
    on_cpu = there.device_total + there.host + there.host_checkpoint
    assert there.total(on_gpu=False) == on_cpu, "without GPUs, memory is not pinned"
    exact = planned(tmp_path, "sync.offload=true", "model.config.vocab_size=128", "sync.outer=sgd")
    # The embedding is 4096 bytes, a power of two, the head 4128; layers are 3008.
    assert exact.pinned_total == 4096 + 3 * 4096 + 8192
    assert planned(tmp_path).host_rounding == 0


def test_wagma_keeps_its_newest_model_and_a_sum_in_flight_in_cpu_memory(tmp_path) -> None:
    for precision, master in (("bf16", 4), ("fp64", 8)):
        wagma = ["sync.method=wagma", f"parallel.precision={precision}", "checkpoint.background=false"]
        alone, two = (planned(tmp_path, *wagma, f"train.global_batch={8 * n}", replicas=n, shard=2) for n in (1, 2))
        assert (alone.host_models, two.host_models) == (0, 2 * master * 3864 / 2)
        assert two.pinned_total == 0 and two.host_total == two.host_models + two.host_validation
        assert two.device_total == alone.device_total, "a GPU holds neither"
        assert two.total(on_gpu=False) == two.device_total + two.host_models
    assert planned(tmp_path, "sync.method=local_sgd", replicas=2).host_models == 0


def test_a_replicas_own_parameters_are_copied_while_others_are_validated(tmp_path) -> None:
    for method, replicas, copies in (("diloco", 1, 0), ("diloco", 2, 1), ("synchronous", 2, 0), ("gpa", 1, 1)):
        found = planned(tmp_path, f"sync.method={method}", replicas=replicas, shard=2)
        assert found.host_validation == copies * 4 * 3864 / 2
    without = replace(found, host_validation=0)
    assert found.total(on_gpu=False) == without.total(on_gpu=False), "a copy in place of gradients and activations"
    larger = replace(found, host_validation=found.gradients + found.activations + 100)
    assert larger.total(on_gpu=False) == without.total(on_gpu=False) + 100


def test_runs_that_average_rounded_gradients_in_every_step_have_no_anchor(tmp_path) -> None:
    gradients = ["sync.method=synchronous", "sync.wire={kind: int8, gradients: true}"]
    recipe = make(tmp_path, *gradients)
    assert planned(tmp_path, *gradients, replicas=2).anchors == 0
    of_diloco = checkpoint_bytes(make(tmp_path, "sync.method=diloco"), size_of(recipe), 2)
    assert of_diloco - checkpoint_bytes(recipe, size_of(recipe), 2) == 2 * 4 * 3864


@pytest.mark.parametrize("offload", ["false", "true"])
def test_a_checkpoint_is_written_from_a_copy_in_cpu_memory(tmp_path, offload: str) -> None:
    """With AdamW and DiLoCo, the copy has masters, two moments, the anchor and outer momentum, offloaded or not. If
    checkpoints are not written in the background, only offloaded parts are copied."""
    keys = ["sync.method=diloco", f"sync.offload={offload}", "checkpoint.background="]
    copied, at_once = (planned(tmp_path, *keys[:2], keys[2] + value, shard=2) for value in ("true", "false"))
    one = 4 * 3864 / 2
    assert (copied.host_checkpoint, at_once.host_checkpoint) == (5 * one, 2 * one if offload == "true" else 0)
    assert copied.host_total - at_once.host_total == copied.host_checkpoint - at_once.host_checkpoint
    assert copied.device_total == at_once.device_total == copied.total(on_gpu=True)
    more = copied.total(on_gpu=False) - at_once.total(on_gpu=False)
    assert more == copied.host_checkpoint - at_once.host_checkpoint, "the copy is there while training continues"


@pytest.mark.parametrize(("model", "masks"), [(LLAMA, [1, 1, 1]), (GPT_NEO, [2, 1, 1])], ids=["llama", "gpt_neo"])
def test_masks_of_documents_by_hand(tmp_path, model: str, masks: list[int]) -> None:
    """The mask of 2 sequences of 16 tokens has 512 values in bf16. GPT-Neo has two global layers and a local one."""

    def activations(recomputed: str, *keys: str) -> int:
        recipe = make(tmp_path, f"parallel.activation_checkpointing={recomputed}", *keys, model=model)
        return estimate(recipe, size_of(recipe), 1, 1).activations

    for recomputed, count in zip(("false", "selective", "true"), masks, strict=True):
        plain, masked = (activations(recomputed, f"train.document_mask={mask}") for mask in ("false", "true"))
        assert masked - plain == count * 2 * 512, recomputed
        assert activations(recomputed, "train.document_mask=true", "data.packing=none") == plain


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["sync.method=local_sgd"], 0),
        (["sync.method=synchronous"], 0),
        (["sync.method=diloco"], 2),
        (["sync.method=edit"], 2),
        (["sync.outer=sgd"], 1),
        (["sync.method=edit", "sync.outer=average"], 1),  # its penalty needs the anchor
    ],
)
def test_anchors_only_where_the_method_needs_them(tmp_path, overrides: list[str], copies: int) -> None:
    memory = planned(tmp_path, "sync.warmup_steps=0", *overrides)
    assert memory.anchors == copies * memory.gradients


def test_checkpointing_keeps_layer_inputs_only(tmp_path) -> None:
    recipe = make(tmp_path, "parallel.activation_checkpointing=true")
    size = size_of(recipe)
    kept = LAYERS * 2 * 32 * HIDDEN
    recomputed = 1.25 * SAVED * 2 * 32 * size.linear_features
    assert estimate(recipe, size, 1, 1).activations == pytest.approx(kept + recomputed, abs=2)
    deep = replace(size, layers=48)
    plain = recipe.model_copy(
        update={"parallel": recipe.parallel.model_copy(update={"activation_checkpointing": False})}
    )
    assert estimate(recipe, deep, 1, 1).activations < estimate(plain, deep, 1, 1).activations / 4


def test_selective_checkpointing_keeps_what_matrix_products_gave(tmp_path) -> None:
    size = size_of(make(tmp_path))
    assert size.linear_outputs == 4 * HIDDEN + 2 * INNER + HIDDEN
    found = planned(tmp_path, "parallel.activation_checkpointing=selective")
    kept = LAYERS * 2 * 32 * (size.linear_outputs + 2 * HIDDEN)
    assert found.activations == pytest.approx(kept + 1.25 * SAVED * 2 * 32 * size.linear_features, abs=2)


def test_sgd_and_precision(tmp_path) -> None:
    assert planned(tmp_path, "optim.kind=sgd").optimizer == 0
    bf16, fp32, fp64 = (planned(tmp_path, f"parallel.precision={p}") for p in ("bf16", "fp32", "fp64"))
    assert bf16.weights / 6 == fp32.weights / 4 == fp64.weights / 8
    assert fp64.activations == pytest.approx(2 * fp32.activations, abs=2)
    assert fp32.activations / bf16.activations == pytest.approx(2 * SAVED_PER_LINEAR["fused"]["fp32"] / SAVED, rel=1e-3)


def test_muon_keeps_one_momentum_of_the_matrices_of_layers(tmp_path) -> None:
    matrices = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    adamw, muon = (planned(tmp_path, "parallel.precision=fp32", f"optim.kind={kind}") for kind in ("adamw", "muon"))
    assert adamw.optimizer - muon.optimizer == 4 * matrices


def test_a_7b_model_takes_no_memory_to_plan(tmp_path) -> None:
    """Allocating the 27 GB of weights would fail for lack of memory or time."""
    config = "{hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32}"
    size: ModelSize = size_of(make(tmp_path, "data.tokenizer=train:32000", model=f"{{type: llama, config: {config}}}"))
    assert size.parameters == 6_738_415_616  # Llama-2-7B's published count


@pytest.mark.parametrize(("steps", "fragments_at_once"), [(0, 1), (25, 1), (26, 2), (75, 3), (100, 4)])
def test_fragments_that_are_in_flight_at_once_are_all_counted(steps: int, fragments_at_once: int) -> None:
    """A round of 100 steps sends one of 4 fragments every 25 steps; the largest has 3 blocks of 10."""
    section, period = OverlappedSection(steps=steps, fragments=4), StepsSection(every=100)
    assert section.parameters_in_flight([10] * 9, period) == 30 + 20 * (fragments_at_once - 1)
