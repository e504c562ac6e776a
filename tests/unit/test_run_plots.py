"""Tests of the pictures of one run and of several runs: what they mark, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmtrain.run_plots import draw_run, draw_runs, end_of_warmup, ends_of_rounds, stride_of_marks


def line(step: int, number: int | None, count: int = 0, of_round: int = 0, **more: Any) -> dict[str, Any]:
    """Return a line of training after `of_round` steps of round `number`. A round has twenty steps, and a step 100 tokens."""
    tags = {"train/loss": 5.0, "sync/count": count, "perf/tokens_per_second": 7.0, "comm/bytes_total": 10.0 * step}
    place = {} if number is None else {"sync/round": number, "sync/round_step": of_round, "sync/period": 20}
    return {"step": step, "tokens": 100 * step, **tags, **place, **more}


WARM = [line(1, 0), line(8, 0), line(16, 1, 0, 6), line(24, 1, 0, 14), line(32, 2, 1, 2), line(50, 2, 2, 20)]
"""Lines of ten synchronous steps and two complete rounds of twenty steps."""


def drawn(monkeypatch: pytest.MonkeyPatch, *arguments: Any, draw: Any = draw_run) -> Figure:
    """Return the figure that `draw` writes."""
    written = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: written.append(self))
    draw(*arguments)
    return written[0]


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_round_ends_where_the_next_one_starts() -> None:
    assert ends_of_rounds(WARM) == [(1, 3000), (2, 5000)]
    assert ends_of_rounds(WARM[:-1]) == [(1, 3000)], "the second round has not ended"
    assert end_of_warmup(WARM) == 1000


def test_rounds_that_end_between_two_lines_are_spread_evenly() -> None:
    lines = [line(10, 1, 0, 10), line(90, 5, 4, 10), line(95, 5, 4, 15)]
    assert ends_of_rounds(lines) == [(1, 2000), (2, 4000), (3, 6000), (4, 8000)]
    lines = [line(2, 0), line(90, 4, 3, 20), line(95, 5, 4, 5)]
    assert ends_of_rounds(lines) == [(1, 3000), (2, 5000), (3, 7000), (4, 9000)]
    assert end_of_warmup(lines) == 1000, "computed from the length of the rounds"


@pytest.mark.parametrize("numbers", [(0, 0, 0), (None, None, None), (1, 1, 1)])
def test_without_synchronous_steps_before_rounds_there_is_no_warm_up(numbers: tuple[int | None, ...]) -> None:
    lines = [line(step, number, 0, step) for step, number in enumerate(numbers, 1)]
    assert end_of_warmup(lines) == 0 and ends_of_rounds(lines) == []


@pytest.mark.parametrize(
    ("rounds", "stride"), [(0, 1), (13, 1), (30, 1), (31, 2), (61, 5), (5000, 200), (10**6, 50_000)]
)
def test_of_many_rounds_some_are_marked(rounds: int, stride: int) -> None:
    assert stride_of_marks(rounds) == stride and rounds / stride <= 30


def test_a_picture_marks_the_warm_up_and_the_rounds_and_has_all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"step": 0, "tokens": 0, "eval/loss": 8.0}, *WARM, {"step": 50, "tokens": 5000, "eval/loss": None}]
    figure = drawn(monkeypatch, lines, Path("loss.png"), "a run")
    losses, costs, sent = figure.axes
    names = ["synchronous warm-up", "synchronizations (2)", "training", "validation"]
    assert legend(losses) == names
    curves = {curve.get_label(): curve for curve in losses.lines}
    assert list(curves["training"].get_xdata()) == [one["tokens"] for one in WARM]
    assert list(curves["validation"].get_xdata()) == [0], "a loss that is not finite is left out"
    assert [float(curve.get_xdata()[0]) for curve in costs.lines if curve.get_linestyle() != "-"] == [3000, 5000]
    assert list(sent.lines[0].get_ydata()) == [10.0 * one["step"] for one in WARM]
    (steps,) = losses.child_axes
    figure.draw_without_rendering()
    assert steps.get_xlabel() == "steps" and steps.get_xlim()[1] == pytest.approx(losses.get_xlim()[1] / 100)


def test_of_five_thousand_rounds_one_in_two_hundred_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(1, 1, 0, 1), *(line(step, step // 10, step // 10, 10) for step in range(100, 50_001, 100))]
    losses = drawn(monkeypatch, lines, Path("loss.png"), "long").axes[0]
    assert "every 200th of 5,000 synchronizations" in legend(losses)
    assert sum(len(curve.get_xdata()) == 2 for curve in losses.lines) == 25


def test_one_replica_sends_nothing_and_has_no_axis_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(1, 0, **{"comm/bytes_total": 0.0})]
    assert len(drawn(monkeypatch, lines, Path("loss.png"), "alone").axes) == 2


def test_runs_of_nothing_are_drawn(tmp_path: Path) -> None:
    draw_run([], tmp_path / "one.png", "a run that logged nothing")
    draw_runs({"a": [], "b": WARM}, tmp_path / "both.png", "eval/loss", "nats per token")
    for name in ("one.png", "both.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error::UserWarning")
def test_names_of_folders_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib reads `$5_$` as an incomplete formula, and leaves names that begin with an underscore out of legends."""
    names = ["lr_$5_$6", "_5", r"_\$5_$"]
    figure = drawn(monkeypatch, dict.fromkeys(names, WARM), Path("p.png"), "eval/loss", "nats", draw=draw_runs)
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *(r"lr_\$5_\$6", "\u200b_5", "\u200b_\\" r"\$5_\$")
    ]
    drawn(monkeypatch, WARM, Path("p.png"), names[0]).draw_without_rendering()


def test_several_runs_are_drawn_in_their_unit_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    validation = {"step": 5, "tokens": 500, "eval/loss": 4.0, "eval/bpb": 1.5}
    runs = {"a": [*WARM, validation], "b": [validation]}
    figure = drawn(monkeypatch, runs, Path("p.png"), "eval/bpb", "bits per byte", "not comparable", draw=draw_runs)
    training, validations = figure.axes
    assert validations.get_ylabel() == "bits per byte" and figure.get_suptitle() == "not comparable"
    assert [list(curve.get_ydata()) for curve in validations.lines] == [[1.5], [1.5]]
    assert [curve.get_label() for curve in validations.lines] == ["a", "b"]
    assert [len(curve.get_xdata()) for curve in training.lines] == [len(WARM), 0]
