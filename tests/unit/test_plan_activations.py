"""Activations that the plan estimates, compared with those that autograd saves for real layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmtrain import attention
from llmtrain.config import Recipe
from llmtrain.model import LanguageModel, blocks_of, build, initialize, model_config
from llmtrain.parallel.wrapping import wrap_layers
from llmtrain.plan.memory import estimate
from llmtrain.plan.model_size import size_of
from llmtrain.recipe_loader import load_recipe

SEQUENCES, LENGTH, CPU = 8, 64, torch.device("cpu")
LLAMA = "{hidden_size: 128, intermediate_size: 344, num_attention_heads: 4, num_hidden_layers: %d}"
NEO = "{hidden_size: 128, num_heads: 4, window_size: 32, num_layers: %d, attention_types: [[[global, local], %d]]}"
QWEN2 = LLAMA.replace("}", ", num_key_value_heads: 4}")
GPTJ = "{n_embd: 128, n_head: 4, rotary_dim: 8, n_layer: %d}"
MODELS: dict[str, Callable[[int], str]] = {
    "llama": lambda layers: LLAMA % layers,
    "gpt_neo": lambda layers: NEO % (layers, layers // 2),
    "gptj": lambda layers: GPTJ % layers,
    "qwen2": lambda layers: QWEN2 % layers,
}


@pytest.fixture(autouse=True)
def _attention_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attention fused for all lengths, as on GPUs and in the plan. For few queries in bf16, a CPU would use matrix
    products and save the attention weights."""
    monkeypatch.setattr(attention, "SHORT", 0)


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


SEPARATOR = 7
"""Token that ends a document where documents are kept apart."""


def recipe_of(tmp_path: Path, family: str, layers: int, precision: str, *overrides: str) -> Recipe:
    path = tmp_path / "small.yaml"
    path.write_text(
        f"model: {{type: {family}, config: {MODELS[family](layers)}}}\n"
        "data: {tokenizer: 'train:300'}\n"
        f"train: {{steps: 10, sequence_length: {LENGTH}, global_batch: {SEQUENCES}, micro_batch: {SEQUENCES}}}\n"
        "sync: {method: local_sgd}\n"
    )
    return load_recipe(path, [f"parallel.precision={precision}", *overrides])


def model_of(recipe: Recipe) -> LanguageModel:
    """Return the recipe's model in the precision in which it computes."""
    separator = SEPARATOR if recipe.train.document_mask else None
    model = build(model_config(recipe.model, 300), recipe.parallel.loss_chunk, separator)
    for block in blocks_of(model):
        initialize(model, block, 0, CPU, torch.float32)
    wrap_layers(blocks_of(model), recipe.parallel)
    return model.to(DTYPES[recipe.parallel.precision]).train()


def ids() -> torch.Tensor:
    return torch.randint(0, 300, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))


def kept(recipe: Recipe) -> int:
    """Return the bytes that autograd saves for backward, without parameters and buffers."""
    model = model_of(recipe)
    if recipe.parallel.compile:
        torch.compiler.reset()  # other tests may have compiled the same layers as often as torch allows
        model.hidden(ids())  # compile before hooks are set, so that they see what compiled layers save
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(ids())
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("family", "off"), [("llama", 0.02), ("gpt_neo", 0.03), ("gptj", 0.2)])
def test_a_layer_keeps_what_the_plan_says(tmp_path: Path, family: str, off: float, precision: str) -> None:
    """The plan takes GPT-Neo's constants for all attention that is not fused. GPT-J needs less memory than that."""
    few, many = (recipe_of(tmp_path, family, layers, precision) for layers in (2, 4))
    planned = [estimate(recipe, size_of(recipe), 1, 1).activations for recipe in (few, many)]
    found = (kept(many) - kept(few)) / (planned[1] - planned[0])
    assert 1 - off < found < 1.02


@pytest.mark.deep
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gpt_neo"])
def test_a_compiled_layer_keeps_what_the_plan_says(tmp_path: Path, family: str, precision: str) -> None:
    keys = ["parallel.compile=true"]
    few, many = (recipe_of(tmp_path, family, layers, precision, *keys) for layers in (2, 4))
    planned = [estimate(recipe, size_of(recipe), 1, 1).activations for recipe in (few, many)]
    found = (kept(many) - kept(few)) / (planned[1] - planned[0])
    assert 0.95 < found < 1.02


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    ("family", "keys", "masks"),
    [
        ("llama", [], 1),
        ("qwen2", [], 4),
        ("gpt_neo", [], 2),
        ("gpt_neo", [f"model.config.window_size={LENGTH}"], 4),
    ],
    ids=["llama", "qwen2", "gpt_neo", "windows as long as the sequence"],
)
def test_masks_of_documents_are_those_that_the_plan_counts(
    tmp_path: Path, family: str, keys: list[str], masks: int, precision: str
) -> None:
    """The models have four layers. In GPT-Neo every second layer is local and has a mask of its windows anyway."""
    of_one = DTYPES[precision].itemsize * SEQUENCES * LENGTH**2
    plain, masked = (
        recipe_of(tmp_path, family, 4, precision, *keys, f"train.document_mask={mask}") for mask in ("false", "true")
    )
    planned = [estimate(recipe, size_of(recipe), 1, 1).activations for recipe in (plain, masked)]
    assert planned[1] - planned[0] == masks * of_one
    more = kept(masked) - kept(plain)
    assert masks * of_one <= more < (masks + 0.9) * of_one, "the rest are positions and document numbers"


def test_a_layers_backward_takes_a_quarter_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    peaks = importlib.import_module("peaks")
    few, many = (recipe_of(tmp_path, "llama", layers, "fp32") for layers in (2, 4))
    sizes = [estimate(recipe, size_of(recipe), 1, 1).activations for recipe in (few, many)]
    layer = (sizes[1] - sizes[0]) / 2
    assert sizes[0] == pytest.approx(2.25 * layer, abs=2)
    model, made = model_of(few), []
    peaks.allocator_peak(lambda: made.append(model.hidden(ids()).sum()))  # the profiler must see the allocations, too
    assert peaks.allocator_peak(made[0].backward) == pytest.approx(layer / 4, rel=0.2)
