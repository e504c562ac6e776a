"""Tests of evaluated checkpoints: models and runs, their labels, and folders that are neither."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.errors import CheckpointError, ModelError, UserError
from llmtrain.eval.evaluated_checkpoint import Checkpoint, check_model_folder, find_checkpoints, labels
from llmtrain.eval.texts import folder_to_load
from tests.unit.test_eval_units import write_model
from tests.unit.test_export_folder import complete


def test_a_checkpoint_is_another_when_its_weights_or_tokenizer_are(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint("a", tmp_path, tmp_path)
    before = checkpoint.fingerprint()
    (tmp_path / "README.md").write_text("a model card may change")
    assert checkpoint.fingerprint() == before
    (tmp_path / "tokenizer.json").write_text("[]")
    changed = checkpoint.fingerprint()
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert len({before, changed, checkpoint.fingerprint()}) == 3


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=message) as error:
            check_model_folder(tmp_path)
        assert "\n" not in str(error.value)

    refused("has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refused("has no tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused("model.safetensors is missing")
    whole = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(whole).to_bytes(8, "little") + whole + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_model_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-3])
    refused(r"model.safetensors is damaged or cut short \(.*\); export the model again")
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    refused("model-00001-of-00001.safetensors is missing")
    index.write_text("{}")
    refused("index.json is damaged")
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_model_folder(tmp_path)  # transformers takes the complete file, despite the old index
    with pytest.raises(ModelError, match="there is no such folder"):
        find_checkpoints(tmp_path / "none", "none", None, False)


def test_a_run_that_has_written_no_checkpoint_has_no_curve(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint; train it until it writes one"):
        find_checkpoints(tmp_path, "run", None, over_time=True)


def test_weights_that_are_no_safetensors_are_left_to_transformers(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    check_model_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError):
        check_model_folder(tmp_path)


def test_a_folder_with_one_model_has_no_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--step 5: .* is one model, not a run with checkpoints; leave --step out"):
        find_checkpoints(tmp_path, "a", 5, False)


def test_several_processes_do_not_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes can't export it at once; first `llmtrain export"):
        find_checkpoints(tmp_path, "a", None, False)


def test_a_run_is_as_new_as_its_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of a later step is of weights from an earlier training. It counts only if the run has no checkpoints."""
    (tmp_path / "recipe.yaml").write_text("{}")
    for step in (6, 12):
        complete(write_model(tmp_path / f"export/step-{step:08}"))
    (tmp_path / "checkpoints/step-00000006").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000006/state.json").write_text("{}")
    monkeypatch.setattr("llmtrain.export.export.exported", lambda run, step: run / f"export/step-{step:08}")
    monkeypatch.setattr("llmtrain.export.source.find_source", lambda run, step: SimpleNamespace(tokens=600))
    assert [found.step for found in find_checkpoints(tmp_path, "run", None, False)] == [6]
    shutil.rmtree(tmp_path / "checkpoints")
    assert [folder_to_load(tmp_path, step).name for step in (None, 6)] == ["step-00000012", "step-00000006"]


def test_labels_are_as_long_as_needed() -> None:
    assert labels([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert labels([Path("one/a"), Path("two/a"), Path("two/b")]) == ["one/a", "two/a", "b"]
    assert labels([Path("/model"), Path("/base/model")]) == ["model", "base/model"], "the root folder has no name"
    with pytest.raises(UserError, match="a is given twice"):
        labels([Path("a"), Path("b/../a")])


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        ('{"step": 10, "tokens": 9000}\n', 9000),
        ('{"step": 20, "tokens": 9000}\n{"step": 10}\n', None),
        ('{"step": 10, "tok', None),
        ('{"step": 10, "tokens": 9000}\n{"step": 20, "tok', 9000),
        (None, None),
    ],
    ids=["there", "another step", "torn", "torn afterwards", "no file"],
)
def test_the_tokens_of_an_export_are_those_in_the_metrics(
    tmp_path: Path, metrics: str | None, tokens: int | None
) -> None:
    folder = write_model(tmp_path / "export/step-00000010")
    (tmp_path / "recipe.yaml").write_text("{}")
    complete(folder)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    (found,) = find_checkpoints(tmp_path, "run", None, False)
    assert (found.folder, found.step, found.tokens) == (folder, 10, tokens)
