"""Recipes of the repository: each can be trained as it is, and compared recipes differ only in their method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from llmtrain.config import ParallelSection, Recipe, StepsSection
from llmtrain.plan import recipe_warnings
from llmtrain.plan.hardware import hardware_of
from llmtrain.plan.memory import estimate
from llmtrain.plan.mesh_plan import MEMORY_HEADROOM
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.plan.time_estimate import estimate_time
from llmtrain.recipe_check import check
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.sync.methods import METHODS

ROOT = Path(__file__).parents[2] / "recipes"
BASES = sorted((ROOT / "base").glob("*.yaml"))
COMPARISONS = sorted((ROOT / "compare").glob("*.yaml"))  # tests/unit/test_comparison.py reads them
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path not in [*BASES, *COMPARISONS])

GPT_NEO = ("gpt_neo_8m", "gpt_neo_125m")
ON_1B = (
    "synchronous",
    "local_sgd",
    "des_loc",
    "diloco",
    "muloco",
    "sparseloco",
    "streaming_diloco",
    "co2",
    "palsgd",
    "edit",
    "a_edit",
    "snoo",
    "gpa",
)
PAIRS = ("3b", "7b", "gpt_neo_125m_fineweb", "llama_fineweb", "llama_python", "llama_stdlib", "llama_tinystories")
"""Models with a recipe of EDiT and a synchronous one."""
COMPARED = [
    *((method, model) for model in GPT_NEO for method in METHODS),
    *((method, "1b") for method in ON_1B),
    *((method, "350m") for method in ("synchronous", "edit", "qsr")),
    *(("streaming_diloco", model) for model in ("350m", "3b", "7b")),
    *((method, model) for model in PAIRS for method in ("synchronous", "edit")),
]
"""Method and model of each recipe that is part of a comparison of methods: `<method>_<model>.yaml`."""
PROCESSES = {
    **dict.fromkeys(("gpt_neo_8m", "gpt_neo_125m", "gpt_neo_125m_fineweb"), 4),
    **dict.fromkeys(("350m", "1b", "3b", "7b"), 64),
    **dict.fromkeys(("llama_python", "llama_stdlib", "llama_tinystories"), 4),
    "llama_fineweb": 2,
}
ZERO = {"edit_1b_zero1": (1, False), "edit_7b_zero3": (3, False), "edit_7b_zero_offload": (3, True)}
ZERO_ON_CPU = {"edit_llama_stdlib_zero3": (3, False)}
"""Recipes with DeepSpeed's engine, with ZeRO's stage and whether it offloads."""
SHARDS = {**dict.fromkeys(("350m", "1b", "3b", "7b", "1b_zero1", "7b_zero3"), 8), "7b_zero_offload": 2}
"""Ranks per replica in the recipes for GPUs of 80 GB, by the end of their names."""
PUBLISHED = ("synchronous_35m", "diloco_35m")
"""Recipes of a published comparison, whose learning rates and batches differ by the number of replicas."""
SEVERAL_TEXTS = {"mixture": ["stories", "stdlib"], "text_per_replica": ["stories", "stdlib"]}
"""Recipes with several texts, and the values of `data.source` of these texts."""
TEXTS = {
    "stories",
    "stdlib",
    "python",
    "hf:roneneldan/TinyStories",
    "hf:HuggingFaceFW/fineweb",
    "hf:HuggingFaceFW/fineweb-edu",
    "hf:allenai/c4",
}
"""Values of `data.source` in all recipes: texts that are on every machine, and datasets of the hub."""
MAY_DIFFER = ("run.name", "sync", "optim.kind", "optim.muon")
"""Keys in which recipes that are compared may differ."""
ALSO_DIFFERS = {"muloco": ("optim.lr",), "gpa": ("optim.lr",)}
"""Keys of the inner optimizer in which recipes of these methods may differ: they have other best learning rates."""
OF_ONE_REPLICA = {"snoo", "gpa"}
"""Methods for one replica, whose recipes make all ranks one replica."""
MESH = ("parallel.replicas", "parallel.shards", "parallel.shard_across_nodes")
"""Keys in which the recipes of methods for one replica may differ, too."""
ALSO_FOR_QUICKSTART = {
    "qsr": ["sync.period.alpha=0.02"],
    "a_edit": ["sync.period.every=3", "sync.period.min_steps=0"],
    "gpa": ["sync.period=1", "sync.outer.decay=0.98"],
}
"""Overrides that the quickstart needs in addition to `sync.method`, as docs/methods.md says."""
OWN_ROUND = {"wagma", "gpa"}
"""Methods whose rounds have a fixed length that belongs to the method and is not that of the comparison."""


def bases_of(path: Path) -> set[Path]:
    """Return the base files that a recipe names, and those that they name."""
    named = yaml.safe_load(path.read_text()).get("base") or []
    direct = {(path.parent / name).resolve() for name in ([named] if isinstance(named, str) else named)}
    return direct.union(*(bases_of(base) for base in direct))


def header_of(path: Path) -> list[str]:
    """Return the comment lines that a file begins with, without `# `."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("# "))
    return [line.removeprefix("# ") for line in lines[:end]]


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    """Return every recipe by the name of its file."""
    assert RECIPES and BASES
    return {path.stem: load_recipe(path) for path in RECIPES}


def test_every_recipe_can_be_trained_under_its_files_name(recipes: dict[str, Recipe]) -> None:
    for name, recipe in recipes.items():
        check(recipe, None)
        assert recipe.run.name == name


def test_every_recipe_reads_back_the_same(recipes: dict[str, Recipe], tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    for name, recipe in recipes.items():
        resolved.write_text(resolved_yaml(recipe))
        assert load_recipe(resolved) == recipe, name


def test_every_file_begins_with_a_comment_that_says_what_it_is_and_where_its_values_come_from() -> None:
    headers = {path.name: header_of(path) for path in RECIPES + BASES}
    assert not {name: header for name, header in headers.items() if not header or len(header[0]) <= 20}
    assert not [path.name for path in RECIPES if len(headers[path.name]) < 2], "say where its values come from"


def test_a_header_has_the_recipes_tokens(recipes: dict[str, Recipe]) -> None:
    told = {path.stem: re.search(r"([\d.]+) B tokens", header_of(path)[0]) for path in RECIPES}
    billions = {name: float(found[1]) for name, found in told.items() if found}
    assert billions and all(recipes[name].train.tokens == 1e9 * number for name, number in billions.items())


def test_a_base_is_used_and_says_nothing_of_one_run() -> None:
    # A `sync` section would bring choices of one method into the recipes of another.
    assert not [path.name for path in BASES if {"run", "sync"} & yaml.safe_load(path.read_text()).keys()]
    used = set().union(*map(bases_of, RECIPES))
    assert {path.resolve() for path in BASES} == used - {path.resolve() for path in RECIPES}


def test_every_method_has_its_recipe_and_no_other_has_its_name(recipes: dict[str, Recipe]) -> None:
    for method, model in COMPARED:
        recipe = recipes[f"{method}_{model}"]
        assert recipe.sync.method == method
        check(recipe, PROCESSES[model])
    for model in PROCESSES:
        named = {name for name in recipes if name.endswith(f"_{model}")}
        assert named == {f"{method}_{its}" for method, its in COMPARED if its == model}


def test_compared_recipes_differ_in_their_method_alone(recipes: dict[str, Recipe]) -> None:
    for method, model in COMPARED:
        baseline, recipe = (recipes[f"{name}_{model}"] for name in ("synchronous", method))
        ignored = (*MAY_DIFFER, *(MESH if method in OF_ONE_REPLICA else ()), *ALSO_DIFFERS.get(method, ()))
        assert differences(baseline, recipe, ignore=ignored) == [], (method, model)
        assert (recipe.parallel.replicas == 1) == (method in OF_ONE_REPLICA)


def test_a_recipe_of_a_method_has_a_synchronous_partner(recipes: dict[str, Recipe]) -> None:
    parts = {name: method for name in recipes for method in METHODS if name.startswith(f"{method}_")}
    models = {
        name: name.removeprefix(f"{method}_")
        for name, method in parts.items()
        if name not in {*PUBLISHED, *ZERO, *ZERO_ON_CPU}
    }
    assert recipes.keys() - models.keys() == {"quickstart", *SEVERAL_TEXTS, *PUBLISHED, *ZERO, *ZERO_ON_CPU}
    assert set(models.values()) == PROCESSES.keys()
    assert not [model for model in models.values() if f"synchronous_{model}" not in recipes]


def test_recipes_of_the_scaling_laws_follow_their_formulas(recipes: dict[str, Recipe]) -> None:
    """With N = 35 M parameters and M replicas, arXiv 2503.09799 gives a learning rate of 22256 N^-0.8827 M^0.2929 and
    batches of 14.521 N^0.4695 M^0.3399 tokens."""
    synchronous, diloco = (recipes[name] for name in PUBLISHED)
    ignored = ("run.name", "sync", "parallel", "optim.lr", "train.global_batch", "train.micro_batch")
    assert differences(synchronous, diloco, ignore=ignored) == []
    for recipe, replicas in ((synchronous, 1), (diloco, 4)):
        check(recipe, 1)
        assert recipe.parallel.replicas == replicas
        assert recipe.optim.lr == pytest.approx(22256 * 35e6**-0.8827 * replicas**0.2929, rel=0.01)
        assert 1 <= recipe.train.tokens_per_step / (14.521 * 35e6**0.4695 * replicas**0.3399) < 1.4
        assert recipe.optim.weight_decay == pytest.approx(1 / recipe.train.total_steps, rel=0.2)
    assert diloco.sync.period.every == 30 and diloco.train.total_steps // 30 == 284


def test_recipes_of_zero_change_the_engine_alone(recipes: dict[str, Recipe]) -> None:
    for name, (stage, offload) in {**ZERO, **ZERO_ON_CPU}.items():
        recipe, same = recipes[name], recipes[name.partition("_zero")[0]]
        assert (recipe.parallel.engine, recipe.parallel.zero_stage, recipe.parallel.zero_offload) == (
            "zero",
            stage,
            offload,
        )
        assert differences(same, recipe, ignore=("run.name", "parallel")) == []
        check(recipe, 4 if name in ZERO_ON_CPU else 64)


def test_recipes_for_gpus_recompute_no_more_than_their_memory_asks_for(recipes: dict[str, Recipe]) -> None:
    """Recomputing all activations takes a third more computation."""
    for end, shard in SHARDS.items():
        named = [recipe for name, recipe in recipes.items() if name.endswith(f"_{end}")]
        size = size_of(named[0])
        for recipe in named:
            choices = [
                choice
                for choice in (False, "selective", True)
                if _needed(recipe, size, shard, choice) <= MEMORY_HEADROOM * 80 * 2**30
            ]
            assert recipe.parallel.activation_checkpointing == choices[0], recipe.run.name


@pytest.mark.parametrize("end", ["3b", "7b"])
def test_a_header_states_the_estimated_memory(recipes: dict[str, Recipe], end: str) -> None:
    header = " ".join(header_of(ROOT / f"base/llama_{end}_fineweb_edu.yaml"))
    stated = re.search(
        r"8 x 8 GPUs needs ([\d.]+) GiB, .*=selective it needs ([\d.]+) GiB, with true ([\d.]+)\.", header
    )
    recipe = recipes[f"edit_{end}"]
    size = size_of(recipe)
    found = [_needed(recipe, size, 8, choice) / 2**30 for choice in (False, "selective", True)]
    assert stated is not None and list(stated.groups()) == [f"{gib:.1f}" for gib in found]


def test_the_header_of_offloaded_zero_states_the_estimated_memory(recipes: dict[str, Recipe]) -> None:
    header = " ".join(header_of(ROOT / "edit_7b_zero_offload.yaml"))
    stated = re.search(r"nodes of (\d) GPUs .* a node needs (\d+) GiB .* each GPU (\d+) GiB\.", header)
    recipe = recipes["edit_7b_zero_offload"]
    shards, node, gpu = map(int, stated.groups())
    needed = estimate(recipe, size_of(recipe), 8, shards)
    assert (node, gpu) == (round(shards * needed.host_total / 2**30), round(needed.device_total / 2**30))


@pytest.mark.parametrize("name", ["1b", "3b", "7b"])
def test_large_recipes_have_a_checkpoint_an_hour_on_16_gpus(recipes: dict[str, Recipe], name: str) -> None:
    header = (ROOT / f"base/llama_{name}_fineweb_edu.yaml").read_text()
    stated = re.search(r"every (\d+) steps, .*every (\d+) minutes .*on 16 H100 .*\n.*; every (\d+) on 64", header)
    recipe = recipes[f"edit_{name}"]
    every, size, rates = recipe.checkpoint.every, size_of(recipe), hardware_of(recipe, "H100", None, 1.0).rates
    steps = [estimate_time(recipe, size, replicas, 8, rates).step for replicas in (2, 8)]
    assert [int(number) for number in stated.groups()] == [every, *(round(every * step / 60) for step in steps)]
    assert every * steps[0] < 3600
    assert recipe.eval.every % every == 0, "each validated step has a checkpoint, which may be the best"


def test_no_other_header_states_an_estimate() -> None:
    stating = {path.stem for path in ROOT.rglob("*.yaml") if "GiB" in path.read_text()}
    assert stating == {"llama_3b_fineweb_edu", "llama_7b_fineweb_edu", "edit_7b_zero_offload"}


def _needed(recipe: Recipe, size: ModelSize, shard: int, recomputation: bool | str) -> int:
    """Return the bytes that each GPU needs with eight replicas."""
    changed = {"activation_checkpointing": recomputation}
    parallel = recipe.parallel.model_copy(update=changed)
    return estimate(recipe.model_copy(update={"parallel": parallel}), size, 8, shard).device_total


def test_every_engine_text_model_and_method_occurs(recipes: dict[str, Recipe]) -> None:
    engines = get_args(ParallelSection.model_fields["engine"].annotation)
    assert {recipe.parallel.engine for recipe in recipes.values()} == set(engines)
    assert {text.source for recipe in recipes.values() for text in recipe.data.texts().values()} == TEXTS
    assert {recipe.model.type for recipe in recipes.values()} == {"llama", "gpt_neo"}
    assert {recipe.sync.method for recipe in recipes.values()} == METHODS.keys()


def test_recipes_of_several_texts_are_the_quickstart_on_these(recipes: dict[str, Recipe]) -> None:
    for name, texts in SEVERAL_TEXTS.items():
        recipe = recipes[name]
        assert [text.source for text in recipe.data.texts().values()] == texts
        changed = {
            key.partition(":")[0].partition("=")[0] for key in map(str, differences(recipes["quickstart"], recipe))
        }
        assert all(key.startswith(("run.name", "data.", "model.config.vocab_size")) for key in changed), changed
        check(recipe, 4)
    assert recipes["mixture"].data.sources and recipes["text_per_replica"].data.per_replica
    assert any("launch/two_sites.md" in line for line in header_of(ROOT / "text_per_replica.yaml"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_the_quickstart_with_rounds_that_fit(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    recipe = load_recipe(ROOT / "quickstart.yaml", [f"sync.method={method}", *ALSO_FOR_QUICKSTART.get(method, [])])
    check(recipe, 4)
    monkeypatch.setattr(recipe_warnings, "seconds_of_step", lambda *_: 0.2)
    assert not recipe_warnings.recipe_warnings(recipe)
    if recipe.sync.period.kind == "steps":
        assert recipe.train.total_steps / recipe.sync.period.every >= 20, "the run has too few rounds"


@pytest.mark.parametrize("model", GPT_NEO)
def test_compared_rounds_begin_together_and_are_equally_long(recipes: dict[str, Recipe], model: str) -> None:
    sections = {method: recipes[f"{method}_{model}"].sync for method in METHODS}
    fixed = [sync for method, sync in sections.items() if method not in OWN_ROUND]
    assert len({sync.period.every for sync in fixed if isinstance(sync.period, StepsSection)}) == 1
    by_step = [sync for sync in sections.values() if sync.warmup_until_lr is None]
    assert len({sync.warmup_steps for sync in by_step if sync.period.kind != "every_step"}) == 1
