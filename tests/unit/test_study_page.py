"""Tests of the study's page, with records of runs that were never made."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_study import MAIN, finished, likes, plan, record, runs, stages

page, summary, texts, figures = map(
    importlib.import_module, ("study_page", "study_summary", "study_texts", "study_figures")
)


def test_the_heat_map_is_a_table_when_it_is_complete() -> None:
    made, done = finished(MAIN[1], likes(0.006))
    [*losses] = page.heat_rows(done)
    assert [row[0] for row in losses][-2:] == ["0.8, warmed up over 4 rounds", "0.9, warmed up over 4 rounds"]
    assert len(losses) == 6 and {len(row) for row in losses} == {4}
    del done[made[-1].id]
    assert page.heat_rows(done) == []


def test_the_page_compares_with_synchronous_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: dict[str, Any] = {}
    for stage in ("main", "replicas"):
        for cell in stages.STAGES[stage][:2]:
            done |= finished(cell, likes(0.0055))[1]
    partly, _ = finished(MAIN[2], likes(0.0055))
    done |= {run.id: record(run, 4.0 - 0.1 * run.number) for run in partly[:3]}
    synchronous, diloco, averaged = (
        dict(zip(texts.COLUMNS, page.row_of(cell, done), strict=True)) for cell in MAIN[:3]
    )
    assert page.row_of(MAIN[3], done) is None
    assert synchronous["to synchronous"] == "" and float(synchronous["loss"]) > 3
    gap = float(diloco["loss"]) / float(synchronous["loss"]) - 1
    assert float(diloco["to synchronous"].rstrip("%")) == pytest.approx(100 * gap, abs=0.1) and gap < 0
    assert diloco["± seeds"] == "0.0001"
    assert (
        diloco["chosen"]
        == "optim.lr=0.012 outer={kind: nesterov, lr: 0.4, momentum: 0.9, rounds: {momentum_warmup: 0}}"
    )
    assert averaged["best trial"] == "3.8000 (3 of 12)" and averaged["loss"] == ""
    assert [row[0] for row in page.formula_rows(done)] == ["4", "8"]
    assert page.formula_rows(done)[0][2] == "+3.7%", "as in PROTOCOL.md"

    monkeypatch.setattr(page, "RECORDS", tmp_path / "runs.jsonl")
    pages = results, front = tmp_path / "results.md", tmp_path / "front.md"
    for path, name in zip(pages, ("RESULTS_PAGE", "README"), strict=True):
        path.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
        monkeypatch.setattr(summary, name, path)
    first = finished(MAIN[1], likes(0.001))[1]
    records = {None: done, page.FIRST_RECORDS: first}
    monkeypatch.setattr(page, "read_records", lambda path=None: records.get(path, {}))
    options = Namespace(write=False)
    monkeypatch.setattr(page, "parser", lambda text: SimpleNamespace(parse_args=lambda: options))
    page.main()
    assert "Gap against" not in capsys.readouterr().out, "this table needs at least two rows"
    assert {*tmp_path.iterdir()} == {*pages} and all("old" in path.read_text() for path in pages)
    done |= finished(stages.STAGES["rounds"][0], likes(0.0055))[1]
    options.write = True
    page.main()
    written = (tmp_path / "README.md").read_text()
    assert "| replicas | DiLoCo to synchronous | published fit | the fit for 1 B parameters |" in written
    assert "## Gap against the number of rounds\n\n| method | H |" in written
    assert "## With a warm-up of 5 % of the steps\n\nThese runs were made first" in written
    assert written.count("## ") == 11 and (tmp_path / "losses.png").stat().st_size > 5_000
    for path in pages:
        lines = path.read_text().splitlines()
        assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    table = results.read_text()
    assert "\n| diloco |" in table and "| 4 replicas, H = 3 | 64 |" in table
    assert (
        "\n| one replica's devices alone | +0.0 % | 100 % | 0 % | 0.39 | 2.6 | 25 |\n| DiLoCo | " in front.read_text()
    )


def test_the_published_fit_stands_beside_the_runs_that_it_is_about() -> None:
    """Cells with another batch, more tokens or other rounds have no fit beside them."""
    others = [plan.Cell("diloco", 4, 30, 128), plan.Cell("diloco", 4, 30, 64, length=4), plan.Cell("diloco", 4, 3, 64)]
    done: dict[str, Any] = {}
    for cell in (MAIN[1], *others):
        done |= finished(cell, likes(0.0055))[1] | finished(page.synchronous_beside(cell), likes(0.0055))[1]
    rows = summary.change_rows(done)
    assert [row[0] for row in rows if row[-1]] == ["4 replicas, H = 30"] and len(rows) == 4
    assert rows[0][-1] == summary.published_gap(4)


def test_the_documentation_has_the_table_of_the_records() -> None:
    """The tables are what `study_page.py --write` would write."""
    done = runs.read_records()
    for path, tables in summary.tables_of_pages(done).items():
        assert summary.with_tables(path.read_text(), tables) == path.read_text(), "run study_page.py --write"


def test_measured_speedups_in_the_documentation_are_those_of_the_trials() -> None:
    rows = importlib.import_module("study_measured").speedup_rows(runs.read_records())
    written = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(rows) == 12
    for diloco, streaming in zip(rows[::2], rows[1::2], strict=True):
        mbit, seed, steps = diloco[:3]
        figures = (f"{measured} ({predicted})" for *_, measured, predicted, _ in (diloco, streaming))
        assert f"| {mbit} Mbit/s, {seed} | {steps} steps | {' | '.join(figures)} |" in written


@pytest.mark.parametrize(("seeds", "words"), [({12}, "1 of 3 diverged"), ({11, 12, 13}, "3 of 3 diverged")])
def test_the_page_shows_how_many_seeds_diverged(tmp_path: Path, seeds: set[int], words: str) -> None:
    usual = likes(0.0055)
    done = finished(MAIN[0], usual)[1]
    figures.draw_losses(done, tmp_path / "without.png")
    done |= finished(MAIN[1], lambda run: None if run.number in seeds and run.kind == "final" else usual(run))[1]
    row = page.row_of(MAIN[1], done)
    assert row[2:9] == (words, *[""] * 6) and row[9].startswith("optim.lr=") and len(row) == len(texts.COLUMNS)
    assert page.formula_rows(done) == []
    figures.draw_losses(done, tmp_path / "with.png")
    assert (tmp_path / "with.png").read_bytes() == (tmp_path / "without.png").read_bytes()
    del done[f"{MAIN[1].name}-final-13"]
    assert page.row_of(MAIN[1], done)[2:9] == ("",) * 7, "not complete"


def test_gaps_are_listed_by_method_and_rounds() -> None:
    """Cells whose final runs are not all done are left out."""
    usual, done = likes(0.0055), finished(MAIN[0], likes(0.0055))[1]
    cells = [MAIN[3], *stages.STAGES["together"][:2], *stages.STAGES["rounds"][:3], MAIN[1], *stages.STAGES["batch"]]
    for cell in cells:
        is_bad = cell.method == "edit"
        done |= finished(cell, lambda run, bad=is_bad: None if bad and run.number == 13 else usual(run))[1]
        of_cell = [one for name, one in done.items() if name.startswith(f"{cell.name}-final") and one["loss"]]
        for one in of_cell:
            one["rounds"] = round(781 * (1 - cell.together)) // cell.every
    assert len(page.rounds_rows(done)) == 7
    del done[f"{stages.STAGES['rounds'][1].name}-final-12"]
    rows = page.rounds_rows(done)
    assert [row[:4] for row in rows] == [
        ("diloco-s8", "30", "8%", "23"),
        ("diloco", "30", "0%", "26"),
        ("diloco", "10", "0%", "78"),
        ("diloco", "3", "0%", "260"),
        ("local_sgd-s8", "30", "8%", "23"),
        ("edit", "30", "0%", ""),
    ]
    row = dict(zip(texts.COLUMNS, page.row_of(MAIN[1], done), strict=True))
    assert rows[1][4:] == tuple(row[column] for column in ("loss", "± seeds", "to synchronous", "sent"))
    assert rows[-1][4:] == ("1 of 3 diverged", "", "", "")


def test_a_loss_is_worth_the_tokens_of_synchronous_training() -> None:
    """The losses of synchronous runs fall here with the logarithm of the share of tokens."""
    usual = likes(0.006)
    done = finished(MAIN[0], usual)[1]
    lowest = page.mean_loss(MAIN[0], done)
    for share in (0.9, 0.5, 0.3):
        assert summary.equal_loss_share(lowest - math.log(share), MAIN[1], done) == pytest.approx(share)
    assert (
        summary.equal_loss_share(lowest - 1, MAIN[1], done) == 1
        and summary.equal_loss_share(lowest + 9, MAIN[1], done) == 0
    )
    assert summary.equal_loss_share(3.0, plan.Cell("diloco", 8, 30, 96), done) is None
    done |= finished(MAIN[1], lambda run: lowest + 0.7 + 0.1 * (run.number - 12))[1]
    assert page.row_of(MAIN[1], done)[5] == "50 % (45 to 55)" and page.row_of(MAIN[0], done)[5] == ""
    worse = done | finished(MAIN[1], lambda run: lowest + 2)[1]
    assert page.row_of(MAIN[1], worse)[5] == "below 27 %" and page.speed_rows(worse) == [] == page.step_rows(worse)
    for change in (None, float("inf")):
        one = "synchronous-m4-b64-shorter50-12"
        done = {name: value for name, value in done.items() if name != one}
        done |= {} if change is None else {one: {"loss": None, "keys": []}}
        assert page.row_of(MAIN[1], done)[5] == "", "a seed is missing, or diverged"


def test_a_method_pays_where_messages_are_long() -> None:
    """Synchronous training reaches the loss of both methods with half of the tokens. DiLoCo sends every 30 steps. Gradients are sent
    while the backward pass, two thirds of a step, goes on."""
    done = finished(MAIN[0], likes(0.006))[1]
    lowest = page.mean_loss(MAIN[0], done)
    for cell in (MAIN[1], MAIN[2]):
        done |= finished(cell, lambda run: lowest + math.log(2) + 0.01 * (run.number - 12))[1]
    [(label, *fast), (other, *_)] = page.speed_rows(done)
    assert (label, other) == ("diloco", "local_sgd")
    speeds = [float(speed.split()[0]) for speed in fast]
    assert [float(rate) for rate in page.step_rows(done)[0][1:]] == pytest.approx(
        [2 * speed for speed in speeds], abs=0.02
    )
    assert speeds == sorted(speeds) and speeds[0] == pytest.approx(0.5, abs=0.06)
    assert speeds[-1] == pytest.approx(0.5 * 101 / (1 + 100 / 30), rel=0.05)
    assert page.seed_rows(done)[1] == ("diloco", "+0.0000", "+0.0000", "+0.0000", "+0.0000")


def test_longer_runs_break_even_with_int8_gradients_where_equal_shorter_ones_do() -> None:
    """Int8 gradients were run with the usual number of tokens only. Here, longer and shorter runs have the same losses."""
    long, done = stages.STAGES["long"], {}
    for baseline in (MAIN[0], long[0], *stages.STAGES["gradients"]):
        done |= finished(baseline, likes(0.006))[1]
    lowest = page.mean_loss(MAIN[0], done)
    for cell in (MAIN[1], long[1]):
        done |= finished(cell, lambda run: lowest + math.log(1.3) + 0.01 * (run.number - 12))[1]
    rows = {label: [float(steps) for steps in row] for label, *row in page.break_even_rows(done)}
    assert rows["diloco-x4"] == pytest.approx(rows["diloco"], rel=0.05) and len(rows["diloco"]) == 3


def test_a_method_without_a_break_even_point_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiLoCo's break-even point with fp32 gradients is at 0.8 steps here."""
    times = importlib.import_module("study_times")
    cells = {cell.label: cell for cell in MAIN if cell.label in ("diloco", "streaming_diloco", "muloco")}
    muon = page.synchronous_beside(cells["muloco"])
    done = finished(MAIN[0], likes(0.006))[1] | finished(muon, likes(0.006))[1]
    lowest = page.mean_loss(MAIN[0], done)
    for cell in cells.values():
        done |= finished(cell, lambda run: lowest + math.log(1.3) + 0.01 * (run.number - 12))[1]
    none = "no int8 run"
    rows = {label: row for label, *row in page.break_even_rows(done)}
    assert 0.7 < float(rows["diloco"][0]) < 0.9 and rows["diloco"][1:] == [none, none]
    done |= finished(stages.STAGES["gradients"][0], likes(0.006))[1]
    rows = {label: row for label, *row in page.break_even_rows(done)}
    assert rows["muloco"][1:] == [none, none] and rows["streaming_diloco"][2] == "has its own wire"
    assert all(float(steps) > 0.9 for steps in (*rows["diloco"][1:], rows["streaming_diloco"][1]))
    for messages, text in (((0.1, 0.5), "above 0.5"), ((2.0, 100.0), "below 2")):
        monkeypatch.setattr(times, "MESSAGES", messages)
        assert next(row[1] for row in page.break_even_rows(done) if row[0] == "diloco") == text


def test_muloco_is_compared_with_synchronous_muon() -> None:
    muon = plan.Cell("synchronous", 4, 30, 64, inner="muon")
    assert muon in MAIN and page.synchronous_beside(plan.Cell("muloco", 4, 30, 64)) == muon
    assert page.synchronous_beside(MAIN[1]) == MAIN[0] == page.synchronous_beside(plan.Cell("diloco", 4, 3, 64))


def test_who_waits_for_slow_replicas_takes_longer() -> None:
    """With one replica at half the speed, A-EDiT takes 240 / 420 of the time of methods that wait for this replica."""
    times = importlib.import_module("study_times")
    assert times.waiting_seconds(60, 1, "half", 11) == times.waiting_seconds(60, 30, "half", 11) == 120
    assert times.waiting_seconds(60, 1, "random", 11) == 120
    assert 60 + 2 * 8 <= times.waiting_seconds(60, 30, "random", 11) < 60 + 2 * 18
    done: dict[str, Any] = {}
    [edit] = [cell for cell in MAIN if cell.method == "edit"]
    a_edit = next(cell for cell in stages.STAGES["uneven"] if cell.method == "a_edit")
    done |= finished(MAIN[0], likes(0.0055))[1] | finished(edit, likes(0.0055))[1]
    assert page.uneven_rows(done) == []
    made, of_a_edit = finished(a_edit, likes(0.0055))
    assert {run.setting.own[0] for run in made} == {"sync.period.min_steps=60"}
    done |= {name: {**one, "virtual_seconds": 780 * 2 * 240 / 420} for name, one in of_a_edit.items()}
    rows = page.uneven_rows(done)
    assert [row[:2] for row in rows] == [("half", "synchronous"), ("half", "edit"), ("half", "a_edit")]
    assert [row[5] for row in rows] == ["1.00", "1.00", "0.57"] and rows[0][6] == "1.00"


def test_the_moment_of_the_synchronous_loss_is_interpolated() -> None:
    """The table has the cells of which at least one seed reaches this loss, with speeds if all seeds do."""
    times = importlib.import_module("study_times")
    curve = [[0, 7.0, 0], [100, 5.0, 1], [200, 3.0, 2], [300, 2.0, 3]]
    assert [times.step_of_loss(curve, loss) for loss in (5.0, 4.0, 2.0, 1.9)] == [100, 150, 300, None]
    done: dict[str, Any] = {}
    for cell in (MAIN[0], MAIN[1], MAIN[2], MAIN[3]):
        made, found = finished(cell, likes(0.0055))
        done |= found
        for run in made:
            if run.kind == "final":
                done[run.id]["loss"] = 3.0
                end = {"diloco": 2.0, "local_sgd": 3.5, "edit": 2.0 if run.seed == 12 else 3.5}.get(cell.method, 3.0)
                done[run.id]["curve"] = [[0, 7.0, 0], [390, 4.0, 1], [780, end, 2]]
    rows = {row[0]: row[1:] for row in times.reach_rows(done)}
    assert rows.keys() == {"diloco", "edit"}
    seeds, steps, tokens, speeds = rows["diloco"]
    assert (seeds, steps, tokens) == ("3 of 3", "585 to 585", "4.8 M") and float(speeds.split(" / ")[2]) > 5
    assert rows["edit"] == ("1 of 3", "585", "4.8 M", "")
