"""Files that are not what they should be: one line says which file, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.compare.comparison import load_comparison
from llmtrain.config import DataSection
from llmtrain.data.sources import documents, fingerprint
from llmtrain.errors import CheckpointError, DataError, ModelError, RecipeError, SuiteError
from llmtrain.eval import texts
from llmtrain.eval.evaluated_checkpoint import check_model_folder, find_checkpoints
from llmtrain.eval.harness import per_document
from llmtrain.recipe_loader import load_recipe
from llmtrain.suites import TextSection, load_suite, local_tasks
from llmtrain.train.checkpoint_files import find_corruption

BINARY = b"\xff\xfe\x00 not text"


@pytest.mark.parametrize(
    ("load", "content", "error", "message"),
    [
        (load_recipe, BINARY, RecipeError, "can't be read as a recipe"),
        (load_comparison, BINARY, RecipeError, "can't be read as a comparison"),
        (load_comparison, b"[1, 2]", RecipeError, "expected keys such as `runs:`"),
        (lambda path: load_suite(str(path)), BINARY, SuiteError, "can't be read as a suite"),
        (lambda path: local_tasks([path.parent]), BINARY, SuiteError, "can't be read as a task file"),
        (lambda path: local_tasks([path.parent]), b"[1, 2]", SuiteError, "holds no mapping, expected a task"),
    ],
    ids=["recipe", "comparison", "a list for a comparison", "suite", "task", "a list for a task"],
)
def test_a_file_that_is_something_else(
    tmp_path: Path, load: Callable[[Path], object], content: bytes, error: type[Exception], message: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as refused:
        load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_json_lines_may_have_empty_ones_between_them(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "first"}\n\n{"text": "second"}\n')
    data = DataSection(source=str(path), validation=str(path))
    assert list(documents(data, "train")) == ["first", "second"]
    path.write_text('{"text": "first"}\n["second"]\n')
    with pytest.raises(DataError, match=r"text\.jsonl:2: expected a JSON object per line, found a list"):
        list(documents(data, "train"))


def test_an_interpreter_without_its_librarys_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.data.python_files.stdlib_root", lambda: tmp_path)
    with pytest.raises(DataError, match=r"stdlib: no \.py files in .*; use data\.source=/path/to/files"):
        list(documents(DataSection(source="stdlib"), "train"))
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe9t\xe9".encode("latin-1"))
    (tmp_path / "plain.py").write_text("answer = 42\n" * 20)
    read = [*documents(DataSection(source="stdlib"), "train"), *documents(DataSection(source="stdlib"), "validation")]
    assert read == ["answer = 42\n" * 20], "a file in another encoding is passed over"


def test_a_hub_source_is_known_by_its_name_subset_and_splits() -> None:
    data = DataSection(source="hf:owner/name", subset="small")
    assert fingerprint(data) == fingerprint(data.model_copy())
    for change in ({"source": "hf:owner/other"}, {"subset": "large"}, {"split": "test"}, {"validation": "dev"}):
        assert fingerprint(data.model_copy(update=change)) != fingerprint(data), change


def test_a_checkpoints_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    size = (tmp_path / "weights").stat().st_size
    assert find_corruption(tmp_path, {"weights": (size, "0")}) == "weights can't be read (Is a directory)"


@pytest.mark.parametrize(
    ("content", "message"), [(b"caf\xe9", "is not UTF-8 text .*; convert it first"), (b" | | ", "has no text between")]
)
def test_a_text_to_be_evaluated_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts.evaluate_text(TextSection(name="text", file="text.txt", separator="|"), path, None, SimpleNamespace(), 1)


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


def sample(**changes: Any) -> dict[str, Any]:
    """A document of lm-evaluation-harness, as it logs them."""
    two = [["question", " yes"], ["question", " no"]]
    likelihoods = [(-1.5, True), (-2.0, False)]
    usual = {
        "doc_id": 0,
        "doc_hash": "abcdef012345",
        "filter": "none",
        "metrics": ["acc", "said"],
        "acc": 1.0,
        "said": "yes",
    }
    return {**usual, "arguments": two, "filtered_resps": likelihoods, "target": 0, **changes}


def test_only_numbers_are_kept_of_a_document() -> None:
    assert per_document([sample()]) == {"doc": ["0:abcdef01"], "acc": [1.0], "nll": [1.5], "bytes": [4]}
    assert per_document([sample(), sample(filter="strict", doc_id=1)]).keys() == {"doc"}, "two answers to one question"


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": [["question", {"until": ["."]}]], "filtered_resps": ["yes"]},
        {"target": 7},
        {"target": "yes"},
        {"filtered_resps": ["yes", "no"]},
    ],
    ids=["generated", "no such choice", "a text", "no likelihood"],
)
def test_a_document_without_the_likelihood_of_a_right_answer(changes: dict[str, Any]) -> None:
    assert per_document([sample(**changes)]).keys() == {"doc", "acc"}
