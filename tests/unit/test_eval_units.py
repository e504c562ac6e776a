"""Tests of evaluation without a model: the units of a suite, the data that they need, and several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import DataError
from llmtrain.eval import command, units
from llmtrain.eval.command import evaluate
from llmtrain.eval.scores import Entry
from llmtrain.eval.units import EvalUnit, LazyModels, Options, units_of
from llmtrain.suites import Suite, TaskSection, load_suite


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a folder that passes for a model as long as nothing loads it."""
    return write_model(tmp_path / "model")


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    return folder


def options(suite: str, data_dir: Path | None, limit: int | None = None) -> Options:
    _, loaded, folders = load_suite(suite)
    return Options(loaded, tuple(folders), data_dir, limit, loaded.batch_size, None)


def test_missing_data_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        units_of(options("tinystories", None))
    assert str(error.value) == (
        "text tinystories_valid reads tinystories/valid.txt: give the folder that has it with --data-dir"
    )
    with pytest.raises(DataError) as error:
        units_of(options("tinystories", tmp_path))
    assert str(error.value) == (
        f"--data-dir {tmp_path} has no tinystories/valid.txt, which text tinystories_valid reads; see eval/README.md"
    )


def scored(value: float | None) -> Entry:
    return Entry(scores={"quiz": {"acc": value, "acc_stderr": None, "n": 4}}, about={"quiz": {}}, shown=["quiz"])


def test_of_several_processes_only_the_main_one_writes_and_does_what_is_not_shared(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def unit(name: str, by_all: bool) -> EvalUnit:
        return EvalUnit(name, {}, ("acc",), lambda models: ran.append(name) or scored(0.5), by_all)

    monkeypatch.setattr(command, "units_of", lambda options: [unit("shared", True), unit("text", False)])
    for rank, results, done in (("1", 0, ["shared"]), ("0", 1, ["shared", "text"])):
        monkeypatch.setenv("RANK", rank)
        found = evaluate([model], "small", out=tmp_path / "out")
        assert len(found) == results and ran == done
        assert (tmp_path / "out").exists() == (rank == "0")
        ran.clear()
    assert len(list((tmp_path / "out/model/cache").iterdir())) == 2


def test_a_suite_of_prompts_alone_has_neither_table_nor_curves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Entry(written=[{"prompt": "Tom", "text": "Tom [sat] down."}])
    monkeypatch.setattr(command, "units_of", lambda options: [EvalUnit("samples", {}, (), lambda models: entry)])
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    (result,) = evaluate([model], "small", over_time=True, out=out)
    assert capsys.readouterr().out == ("model: samples (1 of 1)\n\nmodel writes after 'Tom':\nTom [sat] down.\n")
    assert result["written"] == entry.written and result["results"] == {}
    assert json.loads((out / "small-over-time.json").read_text())["checkpoints"] == [result]
    assert not (out / "small-over-time.png").exists()


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_a_text_of_which_one_document_is_wanted_is_not_told_how_it_is_cut(
    limit: int | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Entry(scores={"tale": {"loss": 1.5, "n": 1, "bytes": 9}}, about={"tale": {}}, shown=["tale"])
    unit = EvalUnit("tale", {"limit": limit}, ("loss",), lambda models: entry)
    monkeypatch.setattr(command, "units_of", lambda options: [unit])
    evaluate([model], "small", limit=limit, out=tmp_path / "out")
    assert ("tale: read as one document" in capsys.readouterr().out) == (limit != 1)


def test_a_task_of_the_harness_needs_its_index_and_no_data_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(units, "check_tasks", lambda names, *_: asked.append(names))
    monkeypatch.setattr(units, "harness_version", lambda: "0.4")
    monkeypatch.setattr(units, "task_manager", lambda *arguments: arguments)
    monkeypatch.setattr(units, "run_task", lambda section, limit, load, manager, is_local: asked.append(manager))
    (tmp_path / "mine.yaml").write_text("group: mine\ntask: [piqa]")
    options = Options(Suite(tasks=(TaskSection(task="mine"),)), (tmp_path,), None, 5, 1, None)
    (unit,) = units_of(options)
    unit.run(LazyModels(Path(), options))
    assert asked == [["mine", "piqa"], ((tmp_path,), None, True)]
    asked.clear()
    options = Options(Suite(tasks=(TaskSection(task="piqa"),)), (), None, 5, 1, None)
    (unit,) = units_of(options)
    key = {"kind": "lm_eval", "lm_eval": "0.4", "entry": units.ENTRY, "task": "piqa", "few_shot": None, "limit": 5}
    assert unit.key == key and unit.by_all
    unit.run(LazyModels(Path(), options))
    assert asked == [["piqa"], ((), None, True)]


@pytest.mark.parametrize(
    ("of_suite", "given", "limit"), [(5, 3, 3), (2, 3, 2), (None, 3, 3), (5, None, 5), (None, None, None)]
)
def test_the_smaller_of_two_limits_holds(of_suite: int | None, given: int | None, limit: int | None) -> None:
    options = Options(Suite(), (), None, limit=given, batch_size=1, device=None)
    assert options.limited(of_suite) == limit
