"""Tests of evaluation with damaged models and data, and with text that spells out special tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.errors import DataError, ModelError
from llmtrain.eval.command import evaluate
from llmtrain.eval.harness import load_model
from llmtrain.eval.texts import load_model_and_tokenizer
from llmtrain.export.folder import copy_tokenizer
from tests.end_to_end.test_eval import write_model

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install -c constraints.txt -e '.[eval]'"
)
from lm_eval.api.instance import Instance


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama whose tokenizer has a token for each byte, and return its folder."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def test_special_tokens_that_a_task_spells_out_are_split_as_in_training(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "exported")
    (tmp_path / "tokenizer").mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "tokenizer")
    copy_tokenizer(load_model_and_tokenizer(folder, "cpu").tokenizer, tmp_path / "tokenizer", folder)
    text = "The end.<|endoftext|>"
    assert (
        len(load_model(folder, 1, "cpu").tok_encode(text))
        == len(load_model_and_tokenizer(folder, "cpu").tokenizer(text)["input_ids"])
        == 21
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lm_evals_own_bars_are_for_a_terminal(model: Path, monkeypatch, capsys, is_terminal: bool) -> None:
    """The bars ignore TQDM_DISABLE, and would fill the log of an evaluation during training."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    loaded = load_model(model, 1, "cpu")
    loaded.loglikelihood([Instance("loglikelihood", {}, ("The", " end."), 0)])
    assert ("Running loglikelihood requests" in capsys.readouterr().err) == is_terminal


def test_losses_that_are_not_numbers_are_no_scores(model: Path, tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text('{"goal": "Wait", "sol1": "yes", "sol2": "no", "label": 0}\n')
    (tmp_path / "stories.txt").write_text("Tom had a ball.")
    folder = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for content, message in (
        ("tasks: [{task: offline_piqa}]", "task offline_piqa: the model's losses are not finite; evaluate another"),
        ("texts: [{name: stories, file: stories.txt}]", "broken: the model's losses are not finite; evaluate another"),
    ):
        (tmp_path / "s.yaml").write_text(content)
        with pytest.raises(ModelError, match=message):
            evaluate([folder], str(tmp_path / "s.yaml"), data_dir=tmp_path, device="cpu", out=tmp_path, limit=2)


def test_damaged_data_of_a_task_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text('{"goal": "Wait", "so')
    (tmp_path / "s.yaml").write_text("tasks: [{task: offline_piqa}]")
    with pytest.raises(DataError, match=r"task offline_piqa: its data can't be read \(.*\); fix the file"):
        evaluate([model], str(tmp_path / "s.yaml"), data_dir=tmp_path, device="cpu", out=tmp_path)
