"""Tests of tables, lines and curves of scores: what they show and compare, and what they leave out."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from llmtrain.eval.evaluated_checkpoint import Checkpoint
from llmtrain.eval.scores import Entry
from llmtrain.eval.table import (
    Evaluated,
    Row,
    cell,
    comparison,
    draw_curves,
    lines_of,
    scores_on_one_line,
    table_of,
    without_rows,
)
from tests.unit.test_eval_units import scored


def evaluated(label: str, acc: list[float], tokens: int = 1000) -> Evaluated:
    value = sum(acc) / len(acc)
    error = math.sqrt(value * (1 - value) / (len(acc) - 1))
    entry = Entry(
        scores={"quiz": {"acc": value, "acc_stderr": error, "n": len(acc)}},
        about={"quiz": {"chance": 0.5, "members": ["quiz"]}},
        shown=["quiz"],
        answers={"quiz": {"doc": [str(i) for i in range(len(acc))], "acc": acc}},
    )
    return Evaluated(Checkpoint(label, Path(label), Path(label), step=10, tokens=tokens), {"quiz": entry})


def test_the_table_says_near_chance_and_names_the_test() -> None:
    good, guess = evaluated("good", [1.0] * 30 + [0.0] * 2), evaluated("guess", [1.0, 0.0] * 16)
    table, notes = table_of("quiz", [good, guess], {"quiz": ["acc", "acc_norm"]}, baseline=guess)
    screen = io.StringIO()
    Console(file=screen, width=120).print(table)
    lines = screen.getvalue().splitlines()
    row = next(line for line in lines if "quiz" in line and "acc" in line)
    assert "0.9375 ± 0.0435" in row and "0.5000 ± 0.0898 near chance" in row and row.count("chance") == 1
    assert any("+0.4375, p = 0.00052" in line for line in lines)  # 15 documents against 1
    assert any("guess (baseline)" in line for line in lines) and any("step 10, 1k tokens" in line for line in lines)
    assert notes[0].startswith("near chance: within 2 standard errors")
    assert notes[1] == (
        "p: two-sided, against guess, paired by document (McNemar's exact test); not corrected for the number of comparisons"
    )


def test_a_task_without_what_is_shown_is_named_with_what_it_has() -> None:
    quiz = evaluated("good", [1.0, 0.0])
    assert without_rows(quiz, {"quiz": ["acc"]}) == without_rows(quiz, {"quiz": []}) == {}
    assert without_rows(quiz, {"quiz": ["acc_nrom"]}) == {"quiz": "acc"}


def test_a_text_that_is_one_document_is_told_how_it_is_cut() -> None:
    one = evaluated("one", [1.0] * 2)
    del one.entries["quiz"].about["quiz"]["chance"]
    one.entries["quiz"].scores["quiz"] |= {"n": 1, "bytes": 9000}
    (note,) = table_of("quiz", [one], {"quiz": ["acc"]}, baseline=None)[1]
    assert note.startswith("quiz: read as one document") and r'suite ("\n\n": a document per' in note
    assert table_of("quiz", [one], {"quiz": ["acc"]}, baseline=None, limited_to_one=["quiz"])[1] == []
    one.entries["quiz"].scores["quiz"]["n"] = 2
    assert table_of("quiz", [one], {"quiz": ["acc"]}, baseline=None)[1] == []


def test_texts_read_one_document_at_a_time_are_tested_among_themselves() -> None:
    """Losses of documents that were read in different contexts are not tested against each other, and a note says why."""
    apart, also, joined = (evaluated(label, [1.0] * 30 + [0.0] * 2) for label in ("apart", "also", "joined"))
    for each in (apart, also):
        each.entries["quiz"].about["quiz"]["separate_documents"] = True
    row = Row("quiz", "quiz", "acc")
    assert comparison(apart, also, row) and not comparison(apart, joined, row) and not comparison(joined, apart, row)
    _, notes = table_of("quiz", [joined, apart], {"quiz": ["acc"]}, baseline=joined)
    assert notes == table_of("quiz", [joined], {"quiz": ["acc"]}, baseline=apart)[1]
    assert len(notes) == 1 and notes[0].startswith(
        "apart: trained on separate documents, so texts are read one document at"
    )


def test_losses_in_windows_of_other_lengths_are_not_tested() -> None:
    short, also, long = (evaluated(label, [1.0] * 30 + [0.0] * 2) for label in ("short", "also", "long"))
    for each, window in ((short, 256), (also, 256), (long, 1024)):
        each.entries["quiz"].about["quiz"]["window"] = window
    row = Row("quiz", "quiz", "acc")
    assert comparison(short, also, row) and not comparison(short, long, row)
    _, [note] = table_of("quiz", [short], {"quiz": ["acc"]}, baseline=long)
    assert note.startswith("quiz: read in windows of 256 (short), 1024 (long) tokens; losses in other windows are not")


def test_in_short_there_is_the_first_score_of_each_task() -> None:
    guess = evaluated("guess", [1.0, 0.0] * 16)
    entry = Entry(scores={"text": {"loss": 1.5, "loss_stderr": None, "n": 3}}, about={"text": {}}, shown=["text"])
    both = Evaluated(guess.checkpoint, {**guess.entries, "text": entry})
    show = {"quiz": ["acc_norm", "acc", "n"], "text": ["loss"]}
    assert scores_on_one_line(both, show) == "quiz acc 0.500 ± 0.090 near chance, text loss 1.500"


def test_a_score_that_is_not_there_is_a_dash() -> None:
    assert cell(evaluated("a", [1.0, 0.0]).entries["quiz"], Row("quiz", "quiz", "f1")) == "–"


def test_curves_are_in_the_order_of_training(tmp_path: Path) -> None:
    points = [evaluated("a", [1.0, 1.0, 0.0, 1.0], 3000), evaluated("a", [1.0, 0.0, 0.0, 1.0], 1000)]
    lines = lines_of(points, Row("quiz", "quiz", "acc"), over_tokens=True)
    assert [(place, value) for place, value, _ in lines["a"]] == [(1000, 0.5), (3000, 0.75)]
    draw_curves(points, {"quiz": ["acc"]}, "quiz", tmp_path / "new/curves.png")
    assert (tmp_path / "new/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error::UserWarning")
def test_curves_show_names_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curves(
        [evaluated("_lr", [1.0, 0.0]), evaluated("lr_$5_$6", [0.0, 1.0])],
        {"quiz": ["acc"]},
        "suite $_$",
        tmp_path / "x",
    )
    figures[0].draw_without_rendering()  # raises an error at a formula
    assert len(figures[0].axes[0].get_legend().get_texts()) == 3, "both runs, and chance"


def at(step: int, tokens: int | None, entry: Entry) -> Evaluated:
    return Evaluated(Checkpoint("run", Path("run"), Path("run"), step, tokens), {"quiz": entry})


def test_curves_leave_out_what_is_not_known() -> None:
    points = [at(10, 1000, scored(0.5)), at(20, None, scored(0.6)), at(30, 3000, scored(None)), at(40, 4000, Entry())]
    row = Row("quiz", "quiz", "acc")
    assert lines_of(points, row, over_tokens=True) == {"run": [(1000, 0.5, 0.0)]}
    assert lines_of(points, row, over_tokens=False) == {"run": [(10, 0.5, 0.0), (20, 0.6, 0.0)]}


def test_a_score_that_is_none_is_not_in_the_line() -> None:
    both = Evaluated(at(10, 1000, Entry()).checkpoint, {"quiz": scored(0.5), "other": scored(None)})
    assert scores_on_one_line(both, {"other": ["acc"], "quiz": ["acc"]}) == "quiz acc 0.500"


def test_a_task_that_only_one_of_two_was_given_is_not_compared() -> None:
    entry = scored(0.5).model_copy(
        update={"about": {"quiz": {"members": ["quiz"]}}, "answers": {"quiz": {"doc": [0, 1], "acc": [1.0, 0.0]}}}
    )
    ours, theirs, row = at(10, 1000, entry), at(10, 1000, Entry()), Row("quiz", "quiz", "acc")
    assert comparison(ours, ours, row) is not None
    assert comparison(ours, theirs, row) is None and comparison(theirs, ours, row) is None
