"""Tests of the study's runs on texts other than Python."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.recipe_loader import load_recipe
from tests.unit.test_study import ROOT, commands, finished, likes, page, plan, record, runs, stages


def test_another_text_has_the_setting_that_was_chosen_on_python() -> None:
    *_, a_edit = stages.STAGES["text"]
    assert stages.runs_of(a_edit, {}) == [], "the setting is not known yet"
    _, chosen = finished(a_edit.tuned, likes(0.0055))
    made = stages.runs_of(a_edit, chosen)
    assert [run.id for run in made] == [f"a_edit-half-tinystories-m4-h30-b64-final-{seed}" for seed in (11, 12, 13)]
    assert {(*run.setting.overrides(),) for run in made} == {(*chosen[f"{a_edit.tuned.name}-final-11"]["keys"],)}
    data = load_recipe(ROOT / runs.RECIPE, made[0].overrides()).data
    assert (data.source, data.validation) == ("hf:roneneldan/TinyStories", "validation")
    assert stages.total(["text"]) == 6 * 3 + 6


def test_runs_on_two_texts_have_equal_parts_of_both() -> None:
    assert stages.total(["sites"]) == 7 * 3
    synchronous, *others = stages.STAGES["sites"]
    for cell in (synchronous, *others):
        [run, *_], _ = finished(cell, likes(0.0055))
        data = load_recipe(ROOT / runs.RECIPE, run.overrides()).data
        entries = data.sources or data.per_replica
        of_each = 1 if cell.text == "mixture" else 2
        assert [entry.name for entry in entries] == ["python"] * of_each + ["tinystories"] * of_each
        assert {getattr(entry, "weight", 1.0) for entry in entries} == {1.0} and data.tokenizer == plan.TOKENIZER
        assert page.synchronous_beside(cell) == synchronous
    assert Counter(cell.text for cell in others) == {"mixture": 3, "sites": 3}


def test_runs_on_another_text_read_given_files_and_keep_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, 'for each; do echo "$each"; done')
    copied: list[str] = []
    monkeypatch.setattr(runs, "copy_tokenizer", lambda: copied.append("once"))
    text, sites = stages.STAGES["text"][0], stages.STAGES["sites"][2]
    of_text, of_sites = (stages.runs_of(cell, finished(cell.tuned, likes(0.0055))[1])[0] for cell in (text, sites))
    python = stages.pending(["main"], {})[0]
    stories = "{source: a, validation: b, name: tinystories}"
    for run, last in (
        (of_text, ["data.source=a", "data.validation=b"]),
        (of_sites, [f"data.per_replica=[{{source: python}}, {{source: python}}, {stories}, {stories}]"]),
        (python, [f"optim.lr={python.setting.lr}"]),
    ):
        (folder := tmp_path / run.id).mkdir()
        job = runs.Job(run, min(os.sched_getaffinity(0)), ["a", "b"])
        job.process.wait(60)
        lines = [line for line in job.log.read_text().splitlines() if not line.startswith("data.tokenizer")]
        assert lines[-len(last) :] == last
        job.log_file.close()
        job.clean_up(record(run, 3.0))
        assert folder.exists() == (run == of_text) and not job.log.exists()
    assert copied == ["once"]


def test_the_tokenizer_of_python_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (prepared := tmp_path / "data" / "tokenizer").mkdir(parents=True)
    (prepared / "tokenizer.json").write_text("{}")
    seen: list[str] = []

    def prepare(recipe: Any, show_progress: bool) -> dict[str, Any]:
        seen.append(recipe.data.tokenizer)
        return {"": SimpleNamespace(directory=prepared.parent)}

    (tmp_path / runs.RECIPE).parent.mkdir(parents=True)
    (tmp_path / runs.RECIPE).write_text((ROOT / runs.RECIPE).read_text())
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "prepare_texts", prepare)
    for _ in range(2):
        runs.copy_tokenizer()
    assert seen == ["train:1024"] and (tmp_path / plan.TOKENIZER / "tokenizer.json").read_text() == "{}"


def test_losses_by_text_are_means_over_the_seeds() -> None:
    cell = stages.STAGES["sites"][2]
    made, done = finished(cell, likes(0.0055))
    assert page.text_rows([cell], done) == [], "these records have no losses by text"
    for number, run in enumerate(made):
        done[run.id]["loss_by_text"] = {"python": 3.0 + number, "tinystories": 2.0}
    [row] = page.text_rows([cell], done)
    assert row[:2] == ("diloco", "sites") and row[-2:] == ("4.0000", "2.0000")
