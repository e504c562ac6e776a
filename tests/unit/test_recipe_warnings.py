"""Warnings about recipes that would do something else than what was asked for, and no other warnings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from llmtrain.plan import recipe_warnings as warnings_module
from llmtrain.plan.recipe_warnings import MeshSize, recipe_warnings
from llmtrain.plan.time_estimate import TimeEstimate
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_preflight import RECIPE, keys

__all__ = ["keys"]  # the fixture


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            ["sync.period.every=19"],
            "sync.period.every is 19, but the run has 18 local steps: replicas synchronize once",
        ),
        (["sync.period={kind: qsr, base: 30, alpha: 0.1}"], "sync.period.base is 30, but the run has 18 local steps"),
        (
            ["sync.method=a_edit", "sync.period.every=37"],
            "sync.period.every is 37 s, but the run's 18 local steps take about 36 seconds",
        ),
        (
            ["sync.method=a_edit", "sync.period={every: 1, min_steps: 37}"],
            "sync.period.min_steps is 37, but 2 x 18 local steps are all of the run: replicas synchronize once",
        ),
        (["log.trace.first=21"], "log.trace.first is 21, but the run has 20 steps"),
        (["sync.method=local_sgd", "sync.offload=true"], "sync.offload is true, but sync.method=local_sgd keeps no"),
        (["sync.method=synchronous", "sync.period=every_step"], "sync.warmup_steps is 2, but sync.method=synchronous"),
        (["parallel.zero_stage=2"], "parallel.zero_stage is 2, but parallel.engine is fsdp2"),
        (["sync.warmup_steps=0", "sync.wire={kind: int8, gradients: true}"], "sync.wire.gradients is true, but the"),
        (["sync.wire={kind: int4, keep: 3}"], "sync.wire.keep is 3, but sync.wire is int4"),
        (
            ["sync.wire={kind: int4, feedback_decay: 0.5}"],
            "sync.wire.feedback_decay is 0.5, but sync.wire.error_feedback is false",
        ),
        (
            ["sync.moments={first: null, second: null}", "sync.reduction=mean"],
            "sync.moments is given, but neither first nor second",
        ),
        (
            ["sync.method=gpa", "sync.period=1", "sync.outer.decay=0.9"],
            "sync.outer.decay is 0.9, an average over about 10 synchronizations, but the run has 18",
        ),
        (["optim.muon.momentum=0.9"], "optim.muon is given, but optim.kind is adamw"),
        (
            ["parallel.reshard_after_forward=false", "parallel.shards=1"],
            "parallel.reshard_after_forward is false, which has an effect on fsdp2",
        ),
        (
            ["data.packing=none", "train.document_mask=true"],
            "train.document_mask is true, but with data.packing=none a sequence never has two documents",
        ),
        (["eval.sample_prompt=a", "eval.sample_tokens=32"], "eval.sample_tokens is 32, but a sample"),
        (
            ["sync.method=synchronous", "sync.period=every_step", "sync.warmup_steps=0", "sync.warmup_until_lr=0.5"],
            "sync.warmup_until_lr is 0.5, but sync.method=synchronous averages gradients in every step",
        ),
        (
            ["schedule.decay_at=[0.25]"],
            "schedule.decay_at is [0.25], but schedule.kind is cosine, and only step has points at which the rate drops",
        ),
        (
            ["schedule.decay_factor=0.5", "schedule.kind=linear"],
            "schedule.decay_factor is 0.5, but schedule.kind is linear",
        ),
        (
            ["schedule.final_ratio=0.3", "schedule.kind=constant"],
            "schedule.final_ratio is 0.3, but schedule.kind is constant",
        ),
        (["schedule.final_ratio=0.3", "schedule.kind=step"], "schedule.final_ratio is 0.3, but schedule.kind is step"),
        (
            ["schedule.decay_fraction=0.1", "schedule.kind=linear"],
            "schedule.decay_fraction is 0.1, but schedule.kind is linear, and only wsd keeps the peak until a decay",
        ),
        (["schedule.decay_shape=1-sqrt"], "schedule.decay_shape is 1-sqrt, but schedule.kind is cosine"),
        (["schedule.decay_factor=0.5", "schedule.kind=wsd"], "schedule.decay_factor is 0.5, but schedule.kind is wsd"),
        (
            ["optim.kind=sgd", "optim.betas=[0.5, 0.9]"],
            "optim.betas is [0.5, 0.9], but optim.kind is sgd, which has no moments",
        ),
        (
            ["data.sources=[{source: a.txt, validation_fraction: 0.1}]"],
            "data.validation_fraction is 0.2, but each text of the list has its own",
        ),
        (["data.subset=small"], "data.subset is small, but data.source is not on the hub: all of its files are read"),
        (["optim.kind=sgd", "optim.eps=0.1"], "optim.eps is 0.1, but optim.kind is sgd, which has no moments"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_value_with_less_effect_than_it_seems_to_have_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], changed: Sequence[str], line: str
) -> None:
    monkeypatch.setattr(warnings_module, "estimate_time", lambda *_: TimeEstimate(2.0, 0, 0, 0))
    monkeypatch.setattr(warnings_module, "rate_here", lambda recipe, local_ranks: 1e9)
    (warning,) = recipe_warnings(load_recipe(RECIPE, [*keys, *changed]), mesh=MeshSize(4, 2, 4))
    assert warning.startswith(line)


@pytest.mark.parametrize(
    "fine",
    [
        ["schedule.kind=step", "schedule.decay_at=[0.25]", "schedule.decay_factor=0.5"],
        ["schedule.final_ratio=0.3"],
        [
            "schedule.kind=wsd",
            "schedule.final_ratio=0",
            "schedule.decay_fraction=0.1",
            "schedule.decay_shape=1-sqrt",
        ],
        ["schedule.kind=constant", "schedule.final_ratio=0.1", "optim.betas=[0.9, 0.95]", "optim.kind=sgd"],
        ["optim.betas=[0.5, 0.9]", "optim.eps=0.1", "sync.warmup_until_lr=0.5"],
        ["data.sources=[{source: a.txt, validation_fraction: 0.1}, {source: b.txt}]"],
        ["sync.method=a_edit", "sync.period={every: 1, min_steps: 36}"],
    ],
)
def test_a_value_that_has_its_effect_or_is_the_default_is_no_warning(keys: list[str], fine: Sequence[str]) -> None:
    assert recipe_warnings(load_recipe(RECIPE, [*keys, *fine])) == []


def test_a_validation_text_that_is_trained_on_is_a_warning(tmp_path: Path, keys: list[str]) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "news", "held"):
        (tmp_path / f"texts/{name}.txt").write_text("text")
    folder = tmp_path / "texts"

    def warnings_of(*changed: str) -> list[str]:
        return recipe_warnings(load_recipe(RECIPE, [*keys, *changed]))

    news, source = f"eval.sets={{news: {folder}/news.txt}}", f"data.source={folder}"
    (line,) = warnings_of(source, f"data.validation={folder}/held.txt", news)
    assert line.startswith(f"eval.sets.news: {folder}/news.txt is in data.source={folder}, so it is trained on")
    assert warnings_of(source, f"data.validation={folder}/news.txt", news) == []
    assert warnings_of(f"data.source={folder}/a.txt", news) == []
    entries = f"{{source: {folder}/a.txt, name: a, validation: {folder}/held.txt}}, {{source: {folder}, name: b}}"
    (line,) = warnings_of(f"data.sources=[{entries}]")
    assert line.startswith(f"data.sources[0].validation: {folder}/held.txt is in data.sources[1].source={folder}")
    (line,) = warnings_of("data.sources=[{source: stdlib}, {source: python}]")
    assert line.startswith("data.sources[0].source: stdlib is in data.sources[1].source=python, so validation text is")
    for name in ("test", "val"):
        (folder / f"{name}.bin").write_bytes(b"")
    pattern, sets = f"data.source={folder}/*.bin", f"eval.sets={{test: {folder}/test.bin, val: {folder}/val.bin}}"
    (line,) = warnings_of(pattern, sets)
    assert line.startswith(f"eval.sets.test: {folder}/test.bin is in {pattern}, so it is trained on")


def test_a_method_that_replaces_one_for_one_replica_averages_with_nobody() -> None:
    recipe = load_recipe(RECIPE.with_name("snoo_gpt_neo_8m.yaml"), ["sync.method=diloco"])
    assert [
        line
        for line in recipe_warnings(recipe, mesh=MeshSize(4, 1, 4))
        if "has no other replica to average with" in line
    ]


def test_no_recipe_of_the_repository_has_a_warning() -> None:
    for path in sorted(RECIPE.parent.glob("*.yaml")):
        recipe = load_recipe(path)
        assert recipe_warnings(recipe) == [], path.name
