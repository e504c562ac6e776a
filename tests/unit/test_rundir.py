"""The run directory."""

from __future__ import annotations

from pathlib import Path

from llmtrain.recipe import load_recipe
from llmtrain.train.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


def test_a_runs_tokenizer_is_copied_once_and_whole(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/tokenizer.json").write_text("first")
    directory = RunDirectory(load_recipe(ROOT / "recipes/quickstart.yaml", [f"run.out_dir={tmp_path}", "run.name=a"]))
    directory.open()
    (tmp_path / "a/tokenizer.tmp").mkdir()  # of a copy that was interrupted
    (tmp_path / "a/tokenizer.tmp/half").touch()
    directory.keep_tokenizer(tmp_path / "cache")
    (tmp_path / "cache/tokenizer.json").write_text("second")
    directory.keep_tokenizer(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "a").glob("tokenizer*")] == ["tokenizer"]
    assert [(path.name, path.read_text()) for path in (tmp_path / "a/tokenizer").iterdir()] == [
        ("tokenizer.json", "first")
    ]
