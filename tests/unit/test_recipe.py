"""Reading of recipes with base files, presets and overrides, and writing of what was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.config import (
    AverageSection,
    BlockingSection,
    EditPenaltySection,
    EveryStepSection,
    LayerwiseSection,
    MeanSection,
    NesterovSection,
    Recipe,
    SgdSection,
    StepsSection,
)
from llmtrain.errors import RecipeError
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.sync.methods import METHODS

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Provide a function that writes a recipe file from its name and text, and returns its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def sync_of(write: Write) -> Callable[..., object]:
    """Provide a function that returns the sync section of a recipe with `sync: TEXT`, after overrides."""
    return lambda text, *overrides: load_recipe(write("r.yaml", f"train: {{steps: 5}}\nsync: {text}"), overrides).sync


# -- where values come from --


def test_later_wins(write: Write) -> None:
    write("base/one.yaml", "optim: {lr: 1.0, eps: 1.0, weight_decay: 1.0, clip_norm: 1.0}")
    write("base/two.yaml", "optim: {eps: 2.0, weight_decay: 2.0, clip_norm: 2.0}")
    path = write("top.yaml", "base: [base/one.yaml, base/two.yaml]\noptim: {weight_decay: 3.0, clip_norm: 3.0}")
    optim = load_recipe(path, ["optim.clip_norm=4"]).optim
    assert (optim.lr, optim.eps, optim.weight_decay, optim.clip_norm) == (1, 2, 3, 4)
    assert optim.betas == (0.9, 0.95)


def test_base_files_are_found_beside_the_file_that_names_them(write: Write) -> None:
    write("base/bottom.yaml", "run: {seed: 7}\noptim: {lr: 1.0}")
    write("base/middle.yaml", "base: bottom.yaml\noptim: {lr: 2.0}")
    recipe = load_recipe(write("top.yaml", "base: base/middle.yaml"))
    assert (recipe.run.seed, recipe.optim.lr) == (7, 2.0)


def test_lists_are_replaced_and_not_merged(write: Write) -> None:
    path = write("r.yaml", "optim: {betas: [0.8, 0.9]}")
    assert load_recipe(path, ["optim.betas=[0.5, 0.6]"]).optim.betas == (0.5, 0.6)


def test_model_config_merges_key_by_key(write: Write) -> None:
    write("base.yaml", "model: {config: {hidden_size: 64, num_hidden_layers: 2}}")
    path = write("r.yaml", "base: base.yaml\nmodel: {config: {num_hidden_layers: 3}}")
    config = load_recipe(path, ["model.config.vocab_size=99"]).model.config
    assert config == {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 99}


def test_empty_sections_and_empty_base_are_fine(write: Write) -> None:
    recipe = load_recipe(write("r.yaml", "base:\ntrain:\noptim: {}"))
    assert recipe.optim == load_recipe(write("empty.yaml", "")).optim


def test_run_is_named_after_its_file_unless_named(write: Write) -> None:
    path = write("my-run_2.yaml", "run: {seed: 1}")
    assert load_recipe(path).run.name == "my-run_2"
    assert load_recipe(path, ["run.name=other"]).run.name == "other"
    assert load_recipe(write("named.yaml", "run: {name: given}")).run.name == "given"


@pytest.mark.parametrize("name", ["2024", "010", "1.10", "2024_01_05", "1e-3", "0x10"])
def test_a_name_is_what_is_written_though_yaml_reads_a_number(write: Write, name: str) -> None:
    path = write("any.yaml", "train: {steps: 3}")
    assert load_recipe(path, [f"run.name={name}"]).run.name == name
    assert load_recipe(path, ["--run.name", name]).run.name == name
    assert load_recipe(path, [f"run={{name: {name}}}"]).run.name == name
    assert load_recipe(write("named.yaml", f"run:\n  name: {name}  # a comment")).run.name == name
    write("base.yaml", f"run: {{name: {name}}}")
    assert load_recipe(write("above.yaml", "base: base.yaml")).run.name == name


def test_a_tilde_is_the_home_folder_in_every_path_but_not_in_a_url(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/me")
    given = [
        "run.out_dir=~/a",
        "data.cache_dir=~/b",
        "checkpoint.mirror=~/c",
        "eval.suite={name: small, data_dir: ~/d}",
    ]
    recipe = load_recipe(write("a.yaml", ""), given)
    assert (recipe.run.out_dir, recipe.data.cache_dir) == ("/me/a", "/me/b")
    assert (recipe.checkpoint.mirror, recipe.eval.suite.data_dir) == ("/me/c", "/me/d")
    recipe = load_recipe(write("a.yaml", ""), ["checkpoint.mirror=s3://bucket/~/c", "run.out_dir=a/~"])
    assert (recipe.checkpoint.mirror, recipe.run.out_dir) == ("s3://bucket/~/c", "a/~")


def test_numbers_as_people_write_them(write: Write) -> None:
    recipe = load_recipe(write("r.yaml", "train: {tokens: 100e9}\noptim: {lr: 3e-4, eps: 1e-8}"))
    assert (recipe.train.tokens, recipe.optim.lr, recipe.optim.eps) == (100_000_000_000, 0.0003, 1e-8)
    assert isinstance(recipe.train.tokens, int)
    assert load_recipe(write("s.yaml", ""), ["train.steps=1e3", "optim.lr=1"]).train.steps == 1000
    counts = [
        "train.global_batch=1e3",
        "sync.period=1e1",
        "checkpoint.every=1e4",
        "eval.every=2e3",
        "sync.warmup_steps=0.0",
    ]
    recipe = load_recipe(write("t.yaml", "sync: {method: diloco}"), counts)
    assert (recipe.train.global_batch, recipe.sync.period, recipe.eval.every) == (
        1000,
        StepsSection(every=10),
        2000,
    )
    assert (recipe.checkpoint.every, recipe.sync.warmup_steps) == (10_000, 0)


def test_a_base_file_may_be_a_recipe_of_the_package(write: Write) -> None:
    """A file of that name in the recipe's folder comes first."""
    above = write("mine.yaml", "base: quickstart\nrun: {name: mine}")
    assert load_recipe(above).train == load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml").train
    write("quickstart", "train: {steps: 7}")
    assert load_recipe(above).train.steps == 7
    with pytest.raises(RecipeError, match="there is no such file"):
        load_recipe(write("other.yaml", "base: quikstart"))


def test_length_in_tokens_is_rounded_down_to_steps(write: Write) -> None:
    path = write("r.yaml", "train: {tokens: 1000, sequence_length: 16, global_batch: 4}")
    assert load_recipe(path).train.total_steps == 1000 // 64


NEEDED = {"qsr": ["sync.period.alpha=1e-3"]}
"""Keys that a method's preset leaves to the recipe."""

# -- methods are presets --


def test_a_methods_inner_optimizer_lies_under_what_the_user_says(write: Callable) -> None:
    path = write("r.yaml", "train: {steps: 9}\nsync: {method: muloco}\noptim: {lr: 0.001, muon: {iterations: 3}}")
    optim = load_recipe(path).optim
    assert (optim.kind, optim.lr, optim.muon.momentum, optim.muon.iterations) == ("muon", 0.001, 0.9, 3)
    assert load_recipe(path, ["optim.kind=adamw"]).optim.kind == "adamw"
    assert load_recipe(path, ["sync.method=diloco"]).optim.kind == "adamw"


def test_preset_lies_under_what_the_user_says(sync_of: Callable) -> None:
    sync = sync_of("{method: edit, outer: {momentum: 0.5}, reduction: {clip: null}}", "sync.period.every=9")
    assert sync.outer == NesterovSection(lr=0.8, momentum=0.5)
    assert sync.reduction.clip is None and sync.reduction.z == 3.0
    assert sync.period == StepsSection(every=9)
    assert sync.schedule == LayerwiseSection()


def test_edit_is_the_default_method(write: Write) -> None:
    path = write("r.yaml", "train: {steps: 5}")
    assert load_recipe(path).sync == load_recipe(path, ["sync.method=edit"]).sync


def test_value_of_another_kind_replaces_the_whole(sync_of: Callable) -> None:
    assert sync_of("{method: diloco, outer: sgd}").outer == SgdSection(lr=1.0)  # not DiLoCo's 0.7
    assert (
        sync_of("{method: edit, schedule: {kind: layerwise, prefetch: 5}}", "sync.schedule=blocking").schedule
        == BlockingSection()
    )
    assert (
        sync_of("{method: edit, schedule: {kind: layerwise, prefetch: 5}}", "sync.schedule=layerwise").schedule.prefetch
        == 5
    )


def test_another_kind_in_its_own_override_replaces_too(sync_of: Callable) -> None:
    assert sync_of("{method: diloco}", "sync.outer.kind=sgd", "sync.outer.lr=0.5").outer == SgdSection(lr=0.5)


def test_a_mean_instead_of_the_penalty_and_the_other_way_round(sync_of: Callable) -> None:
    assert sync_of("{method: edit, reduction: mean}").reduction == MeanSection()
    assert sync_of("{method: edit}", "sync.reduction=mean").reduction == MeanSection()
    assert sync_of("{method: diloco, reduction: {kind: edit_penalty, z: 2}}").reduction == EditPenaltySection(z=2)
    assert sync_of("{method: diloco, reduction: edit_penalty}").reduction == EditPenaltySection()


def test_naming_another_method_leaves_the_old_ones_choices_behind(sync_of: Callable) -> None:
    recipe = (
        "{method: edit, warmup_steps: 3, period: {every: 4}, outer: {lr: 0.1}, reduction: {z: 1}, schedule: layerwise}"
    )
    sync = sync_of(recipe, "sync.method=diloco")
    assert (sync.outer, sync.reduction, sync.schedule) == (
        NesterovSection(lr=0.7, momentum=0.9),
        MeanSection(),
        BlockingSection(),
    )
    assert (sync.warmup_steps, sync.period) == (
        3,
        StepsSection(every=4),
    )  # so that methods are compared at the same round
    assert sync_of(recipe, "sync.method=diloco", "sync.outer=average").outer == AverageSection()
    assert sync_of(recipe, "sync.method=edit").outer.lr == 0.1  # edit is not another method


def test_another_method_is_not_pulled_as_the_old_one_was(write: Write) -> None:
    path = write("r.yaml", "train: {steps: 9}\nsync: {method: palsgd, pull: {strength: 0.5}}")
    assert load_recipe(path).sync.pull is not None
    assert load_recipe(path, ["sync.method=diloco"]).sync.pull is None


def test_synchronous_and_back_drops_rounds(sync_of: Callable) -> None:
    there = sync_of("{method: edit, warmup_steps: 3, period: {every: 4}}", "sync.method=synchronous")
    assert (there.period, there.warmup_steps, there.reduction, there.schedule) == (
        EveryStepSection(),
        0,
        MeanSection(),
        BlockingSection(),
    )
    back = sync_of("{method: synchronous, period: every_step}", "sync.method=edit")
    assert (back.period, back.warmup_steps) == (StepsSection(every=128), 1000)


def test_a_wire_stays_unless_it_is_one_methods_own(sync_of: Callable) -> None:
    assert sync_of("{method: edit, wire: int8}", "sync.method=diloco").wire.kind == "int8"
    assert sync_of("{method: streaming_diloco, wire: int8}", "sync.method=diloco").wire.kind == "fp32"
    assert sync_of("{method: edit, wire: int8}", "sync.method=sparseloco").wire.kind == "topk"
    assert sync_of("{method: edit, wire: int8}", "sync.method=synchronous").wire.kind == "fp32"
    assert sync_of("{method: edit, wire: {kind: int8, gradients: true}}", "sync.method=synchronous").wire.kind == "int8"
    assert sync_of("{method: streaming_diloco}", "sync.method=diloco", "sync.wire=int4").wire.kind == "int4"


def test_what_gradients_send_is_decided_by_all_layers(write: Write) -> None:
    write("base.yaml", "sync: {method: edit, wire: {kind: int8, gradients: true}}")
    path = write("r.yaml", "base: base.yaml\nsync: {wire: {gradients: false}}")
    assert load_recipe(path, ["sync.method=synchronous"]).sync.wire.kind == "fp32"
    empty = write("r.yaml", "base: base.yaml\nsync: {wire: }")
    assert load_recipe(empty, ["sync.method=synchronous"]).sync.wire.kind == "fp32"


def test_the_learning_rate_that_ends_a_synchronous_phase_is_post_local_sgds_own(sync_of: Callable) -> None:
    there = "{method: post_local_sgd, warmup_until_lr: 0.9}"
    assert sync_of(there, "sync.method=diloco").warmup_until_lr is None
    assert sync_of("{method: edit, warmup_until_lr: 0.9}", "sync.method=diloco").warmup_until_lr == 0.9
    assert sync_of("{method: edit, warmup_until_lr: 0.9}", "sync.method=synchronous").warmup_until_lr is None


def test_a_runs_own_recipe_with_another_method_is_that_method(write: Write) -> None:
    """A run's own recipe names every key, also those that the old method's preset chose."""

    def other(method: str, *overrides: str) -> Recipe:
        run = load_recipe(write("r.yaml", f"train: {{steps: 9}}\nsync: {{method: {method}}}"))
        return load_recipe(write("recipe.yaml", resolved_yaml(run)), overrides)

    assert other("edit", "sync.method=post_local_sgd").sync.warmup_until_lr == 0.5
    optim = other("edit", "sync.method=muloco").optim
    assert (optim.kind, optim.muon.momentum) == ("muon", 0.9)
    assert other("muloco", "sync.method=diloco").optim.kind == "adamw"
    assert other("edit", "optim.kind=sgd", "sync.method=muloco").optim.kind == "sgd"


def test_other_files_leave_the_splits_of_a_hub_dataset_behind(write: Write) -> None:
    write("base.yaml", "train: {steps: 5}\ndata: {source: 'hf:a/b', subset: c, split: d, validation: e, text_key: f}")
    path = write("r.yaml", "base: base.yaml")
    data = load_recipe(path, ["data.source=my.jsonl"]).data
    assert (data.subset, data.split, data.validation, data.text_key) == (None, "train", None, "f")
    assert load_recipe(path, ["data.validation=v.txt", "data.source=my.jsonl"]).data.validation == "v.txt"
    assert load_recipe(path, ["data.sources=[{source: a.txt}]"]).data.sources[0].validation is None
    data = load_recipe(path, ["data.source=hf:g/h"]).data
    assert (data.subset, data.split, data.validation) == (None, "d", "e"), "a subset belongs to its dataset"
    assert load_recipe(path, ["data.source=hf:g/h", "data.subset=i"]).data.subset == "i"
    assert load_recipe(path, ["data.source=hf:a/b"]).data.subset == "c"


def test_a_length_means_nothing_to_a_period_of_another_kind(sync_of: Callable) -> None:
    """A period without a kind has the kind of its method's preset."""
    assert sync_of("{method: a_edit, period: {every: 20}}", "sync.method=diloco").period == StepsSection(every=500)
    assert sync_of("{method: qsr, period: {alpha: 0.1}}", "sync.method=local_sgd").period == StepsSection(every=32)
    assert sync_of("{method: diloco, period: {every: 20}}", "sync.method=edit").period == StepsSection(every=20)
    of_both = sync_of("{method: edit, period: {kind: seconds, every: 20}}", "sync.method=a_edit")
    assert of_both.period.every == 20


def test_a_kind_of_a_lower_layer_is_that_of_the_layers_above(write: Write) -> None:
    write("base.yaml", "sync: {method: edit, period: {kind: seconds, every: 9}}")
    write("middle.yaml", "base: base.yaml\nsync: {period: {every: 20}}")
    sync = load_recipe(write("r.yaml", "base: middle.yaml\nsync: {method: diloco}")).sync
    assert sync.period == StepsSection(every=500)


def test_method_of_a_base_file_is_left_behind_as_well(write: Write) -> None:
    write("base.yaml", "sync: {method: edit, period: {every: 4}, outer: {lr: 0.1}}")
    sync = load_recipe(write("r.yaml", "base: base.yaml\nsync: {method: local_sgd}")).sync
    assert (sync.outer, sync.period) == (AverageSection(), StepsSection(every=4))


# -- written back --


@pytest.mark.parametrize("name", ["run", "3e-4", "1_000", "2024", "true", "null", "2024-01-01", "0x10"])
def test_resolved_recipe_reads_back_the_same(write: Write, name: str) -> None:
    text = f"""
run: {{name: "{name}"}}
model: {{config: {{hidden_size: 64, rope_parameters: {{rope_type: default, rope_theta: 10000.0}}}}}}
train: {{tokens: 100e9}}
optim: {{lr: 3e-4, eps: 1e-8, clip_norm: null}}
sync: {{method: edit, reduction: {{clip: null}}, schedule: {{kind: layerwise, prefetch: 1}}}}
eval: {{sample_prompt: "def é: '\\"\\n"}}
"""
    recipe = load_recipe(write("r.yaml", text))
    assert recipe.run.name == name
    assert load_recipe(write("resolved.yaml", resolved_yaml(recipe))) == recipe


@pytest.mark.parametrize("method", METHODS)
def test_resolved_recipe_of_each_method_reads_back_the_same(write: Write, method: str) -> None:
    recipe = load_recipe(write("r.yaml", f"sync: {{method: {method}}}"), NEEDED.get(method, []))
    assert load_recipe(write("resolved.yaml", resolved_yaml(recipe))) == recipe


def test_a_key_that_yaml_reads_as_another_is_refused(write: Write) -> None:
    reason = "YAML reads a key of sets as false; put the key in quotes"
    with pytest.raises(RecipeError, match=reason):
        load_recipe(write("r.yaml", "eval: {sets: {no: norsk.txt}}"))
    with pytest.raises(RecipeError, match=reason):
        load_recipe(write("r.yaml", ""), ["eval.sets={no: norsk.txt}"])
    path = write("r.yaml", 'eval: {sets: {"no": norsk.txt, 2024: news.txt}}')
    assert load_recipe(path, ["eval.sets.no=other.txt"]).eval.sets == {"no": "other.txt", "2024": "news.txt"}


def test_resolved_recipe_holds_every_key(write: Write) -> None:
    text = resolved_yaml(load_recipe(write("r.yaml", "train: {steps: 5}")))
    for section, field in Recipe.model_fields.items():
        assert f"{section}:" in text
        for key in field.annotation.model_fields:
            assert f"\n  {key}:" in text


def test_differences_name_keys_and_both_values(write: Write) -> None:
    path = write("r.yaml", "train: {steps: 5}\nrun: {seed: 1}")
    there = load_recipe(path)
    here = load_recipe(path, ["optim.lr=0.5", "sync.outer=average", "run.seed=2", "model.config.vocab_size=9"])
    found = differences(there, here, ignore=["run"])
    assert "optim.lr: 0.0003 there, 0.5 here" in found
    assert 'sync.outer.kind: "nesterov" there, "average" here' in found
    assert "sync.outer.momentum: 0.85 there, not given here" in found
    assert any(line.startswith("model.config") for line in found)
    assert not any(line.startswith("run") for line in found)
    assert differences(there, here, ignore=["optim.lr", "sync", "run.seed", "model"]) == []
    assert differences(there, there) == []
