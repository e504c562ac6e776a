"""Tests of an ordinary text file, which is one document unless a separator cuts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.config import DataSection
from llmtrain.data import prepare as prepare_module
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.errors import DataError
from llmtrain.launch.preflight import check_here
from llmtrain.recipe_loader import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
REFUSED = r"""book\.txt is one document, .*'data\.separator="\\n\\n"' .*or give data\.validation=FILE"""


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"Paragraph {number}." for number in range(50)))
    return [f"data.source={book}", f"data.cache_dir={tmp_path}", f"run.out_dir={tmp_path}", "data.tokenizer=train:300"]


def test_it_is_refused_before_a_run_and_by_prepare(keys: list[str]) -> None:
    recipe = load_recipe(RECIPE, keys)
    with pytest.raises(DataError, match=REFUSED):
        check_here(recipe)
    with pytest.raises(DataError, match=REFUSED):
        prepare(recipe.data, 100, 10)
    assert not cache_path(recipe.data).exists()


def test_the_separator_that_is_named_cuts_it(keys: list[str]) -> None:
    recipe = load_recipe(RECIPE, [*keys, 'data.separator="\\n\\n"', "data.validation_fraction=0.2"])
    splits = prepare(recipe.data, 100_000, 100_000).index.splits
    assert sum(entry.documents for entry in splits.values()) == 50


def test_with_a_validation_text_of_its_own_it_is_fine(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another text.")
    recipe = load_recipe(RECIPE, [*keys, f"data.validation={tmp_path}/other.txt"])
    assert prepare(recipe.data, 100_000, 100_000).index.splits["train"].documents == 1


def test_documents_of_which_a_split_has_none_may_be_equal() -> None:
    of = DataSection(source="a.txt")

    def remedy(data: DataSection) -> str:
        return str(prepare_module._no_documents(data, "validation", 4000))

    assert "has all 4,000, which therefore seem to be equal" in remedy(of)
    few = of.model_copy(update={"validation_fraction": 0.001})
    assert """more of them ('data.separator="\\n\\n"' cuts""" in remedy(few)
    assert "more of them, change" in remedy(few.model_copy(update={"separator": "\n\n"}))
    assert "give another data.validation, or more text" in remedy(of.model_copy(update={"validation": "empty.txt"}))


def test_texts_of_which_none_is_held_out_are_refused_before_one_is_tokenized(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    for number in range(3):
        (tmp_path / "books" / f"{number}.txt").write_text(f"Book {number}.")
    recipe = load_recipe(RECIPE, [*keys, f"data.source={tmp_path}/books"])
    monkeypatch.setattr(prepare_module, "load_tokenizer", None)  # training a tokenizer may take long
    monkeypatch.setattr(prepare_module, "extend", None)
    for refuse in (lambda: check_here(recipe), lambda: prepare(recipe.data, 100, 10)):
        with pytest.raises(DataError, match=r"books: no validation documents; give more of them"):
            refuse()
    assert not cache_path(recipe.data).exists()


def test_only_the_first_documents_are_read_beforehand(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(prepare_module.TextStream):
        read = 0

        def __iter__(self) -> Iterator[tuple[str, str]]:
            for found in super().__iter__():
                Counted.read += 1
                yield found

    recipe = load_recipe(RECIPE, [*keys, 'data.separator="\\n\\n"', "data.validation_fraction=0.2"])
    monkeypatch.setattr(prepare_module, "TextStream", Counted)
    prepare_module.check_documents(recipe.data)
    assert 2 <= Counted.read < 25
