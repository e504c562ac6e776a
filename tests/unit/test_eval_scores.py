"""Tests of scores: their cache, paired tests by document, and the comparison with chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.eval.scores import (
    BOOTSTRAP,
    MCNEMAR,
    Cache,
    Entry,
    bits_per_byte,
    chance_of,
    compare,
    compare_with_chance,
    have_one_chance_level,
    mcnemar,
    paired_bootstrap,
    ratio_of_sums,
    write_json,
)
from llmtrain.eval.units import units_of
from llmtrain.suites import digests_of_data
from tests.unit.test_eval_units import options


def test_a_unit_is_kept_for_one_model_one_setting_and_one_state_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "tinystories").mkdir()
    for name in ("train", "valid"):
        (tmp_path / f"tinystories/{name}.txt").write_text("Once upon a time.")
    unit = units_of(options("tinystories", tmp_path))[0]
    entry = Entry(scores={"a": {"loss": 1.5, "loss_stderr": None, "n": 1}}, shown=["a"])
    cache = Cache(tmp_path / "cache", "model 1")
    assert cache.read(unit.name, unit.key) is None
    cache.write(unit.name, unit.key, entry)
    assert cache.read(unit.name, unit.key) == entry
    assert type(cache.read(unit.name, unit.key).scores["a"]["n"]) is int
    assert Cache(tmp_path / "cache", "model 2").read(unit.name, unit.key) is None
    limited = units_of(options("tinystories", tmp_path, limit=3))[0]
    assert cache.read(limited.name, limited.key) is None
    (tmp_path / "tinystories/valid.txt").write_text("Another time.")
    changed = units_of(options("tinystories", tmp_path))
    assert cache.read(changed[0].name, changed[0].key) is None
    assert digests_of_data(tmp_path, ["tinystories/train.txt"], "x") == changed[1].key["data"]


def test_a_damaged_cache_file_is_as_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "model")
    cache.write("piqa", {"limit": None}, Entry())
    cache.path("piqa", {"limit": None}).write_text('{"key": ')
    assert cache.read("piqa", {"limit": None}) is None


def test_results_that_can_not_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file/new/small.json"
    with pytest.raises(UserError) as refused:
        write_json(path, {})
    assert str(refused.value) == f"{path} can't be written (Not a directory); choose another folder with --out"


def test_mcnemar_by_hand() -> None:
    ours, theirs = [1, 1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0]
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours) == 2 * (1 + 6) / 2**6  # 5 documents against 1
    assert mcnemar([1, 0], [0, 1]) == 1.0
    assert mcnemar([1, 1], [1, 1]) == 1.0
    ours, theirs = [1] * 900 + [0] * 1100, [0] * 900 + [1] * 1100
    assert mcnemar(ours, theirs) == 2 * sum(math.comb(2000, k) for k in range(901)) / 2**2000


def test_the_paired_bootstrap_sees_pairs() -> None:
    theirs = [float(10 + i % 7) for i in range(40)]
    better = [value - 0.1 for value in theirs]  # far less than the documents differ from each other
    assert paired_bootstrap(better, theirs, [1.0] * 40) == pytest.approx(2 / 10_001)
    assert paired_bootstrap(theirs, theirs, [1.0] * 40) == 1.0
    mixed = [value + (0.1 if i % 2 else -0.1) for i, value in enumerate(theirs)]
    assert paired_bootstrap(mixed, theirs, [1.0] * 40) > 0.5
    assert paired_bootstrap([1.0], [2.0], [1.0]) == 1.0, "one document shows no difference"
    assert paired_bootstrap([1.0] * 3, [2.0] * 3, [1.0] * 3) == 0.25


def test_only_the_same_documents_are_compared() -> None:
    a = {"doc": ["0:x", "1:y"], "acc": [1.0, 1.0], "nll": [1.0, 2.0], "bytes": [4, 4]}
    b = {"doc": ["0:x", "1:y"], "acc": [0.0, 1.0], "nll": [2.0, 2.0], "bytes": [4, 4]}
    found = compare([a], [b], "acc")
    assert found is not None and (found.difference, found.p, found.test, found.n) == (0.5, 1.0, MCNEMAR, 2)
    bits = compare([a], [b], "bits_per_byte")
    assert bits is not None and bits.test == BOOTSTRAP and bits.difference == pytest.approx(-1 / math.log(2) / 8)
    assert compare([a], [b | {"doc": ["0:x", "2:z"]}], "acc") is None
    assert compare([a], [b], "perplexity") is None


@pytest.mark.parametrize("changes", [{"bytes": [4, 5]}, {"nll": None}], ids=["other bytes", "no likelihoods"])
def test_bits_per_byte_are_compared_over_the_same_bytes(changes: dict[str, Sequence[int] | None]) -> None:
    ours = {"doc": ["0:x", "1:y"], "nll": [1.0, 2.0], "bytes": [4, 4]}
    theirs = {key: value for key, value in (ours | changes).items() if value is not None}
    assert compare([ours], [ours], "bits_per_byte") is not None
    assert compare([ours], [theirs], "bits_per_byte") is None and compare([theirs], [ours], "bits_per_byte") is None


def test_bits_per_byte_and_its_standard_error() -> None:
    value, error = bits_per_byte([math.log(2) * 3, math.log(2) * 5], [2, 2])
    assert value == pytest.approx(2.0)
    assert error == pytest.approx(0.5)  # the standard error of the mean of 1.5 and 2.5
    assert ratio_of_sums([3.0], [2.0]) == (1.5, None)


def test_chance_is_a_guess_or_the_commonest_answer() -> None:
    assert chance_of([([["a", "b"], ["c", "d", "e", "f"]], [0, 1])]) == 0.375
    fixed = ([["no", "yes"]] * 4, [1, 1, 1, 0])
    assert chance_of([fixed]) == 0.75
    assert chance_of([([["no", "yes"], ["bad", "good"]], [1, 1])]) == 0.5
    assert chance_of([([["no", "yes"]], [1])]) == 0.5, "the answer of a single document is the commonest by accident"
    subjects = [([["A", "B", "C", "D"]] * 6, [0, 0, 0, 1, 2, 3]), ([["A", "B", "C", "D"]] * 6, [3, 3, 3, 1, 2, 0])]
    assert chance_of(subjects) == pytest.approx(4 / 12), "each subject has a different commonest letter"
    assert chance_of([*subjects, fixed]) == pytest.approx((4 + 3) / 16)


@pytest.mark.parametrize(
    ("value", "stderr", "called"),
    [(0.27, 0.014, "near chance"), (0.28, 0.014, ""), (0.20, 0.012, "below chance"), (0.25, 0.0, "near chance")],
)
def test_what_a_score_is_called(value: float, stderr: float, called: str) -> None:
    assert compare_with_chance(value, stderr, chance=0.25, n=1000) == called


def test_tasks_with_other_numbers_of_choices_have_other_chance_levels() -> None:
    two, four = ([["a", "b"]], [0]), ([["a", "b", "c", "d"]], [0])
    assert have_one_chance_level([two, two]) and not have_one_chance_level([two, four])


def test_a_perfect_score_on_two_documents_says_nothing() -> None:
    assert compare_with_chance(1.0, 0.0, chance=0.5, n=2) == "near chance"
