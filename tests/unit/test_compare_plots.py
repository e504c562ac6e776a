"""Tests of the plots of a comparison: positions of the conditions, medians over seeds, the target, and the axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from llmtrain.compare.measures import find_sweeps, gather
from llmtrain.compare.plots import draw_loss, draw_throughput, draw_time, draw_timelines
from llmtrain.compare.results import load_trials
from tests.unit.written_trials import logged, straight, validation, write_trace, write_trial


def throughput(folder: Path, planned: Sequence[tuple[str, str, int]] = ()) -> Axes | None:
    results = gather(load_trials([folder]), planned=planned)
    (sweep,) = find_sweeps(list(results.targets))
    figure = draw_throughput(results, sweep)
    return figure and figure.axes[0]


def losses(folder: Path, cost: str = "seconds") -> Axes:
    results = gather(load_trials([folder]))
    figure = draw_loss(results, next(iter(results.targets)), cost)
    assert figure is not None
    return figure.axes[0]


def labeled(axes: Axes, label: str) -> Line2D:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


@pytest.mark.parametrize(
    ("conditions", "scale", "places"),
    [
        (["unlimited", "100mbit", "30mbit"], "linear", {30: "30", 100: "100", 170: "unlimited"}),
        (["unlimited", "1gbit", "500mbit", "10mbit"], "log", {10: "10", 500: "500", 1000: "1000", 2000: "unlimited"}),
        (["fast", "slow", "80mbit", "10mbit"], "linear", {10: "10", 80: "80"}),
        (["nobody", "lag1", "lag2"], "linear", {0: "nobody", 1: "1", 2: "2"}),
        (["nobody", "lag0", "lag20"], "linear", {-20: "nobody", 0: "0", 20: "20"}),
        (["nobody", "lag0.5", "lag2", "lag10"], "log", {0.125: "nobody", 0.5: "0.5", 2: "2", 10: "10"}),
        (["lag0", "lag1", "lag10"], "linear", {0: "0", 1: "1", 10: "10"}),
    ],
    ids=[
        "rates",
        "rates far apart",
        "others beside rates",
        "delays",
        "delays from nothing",
        "delays far apart",
        "a delay of nothing",
    ],
)
def test_conditions_stand_at_their_number_or_beyond_the_end(
    tmp_path: Path, conditions: list[str], scale: str, places: dict[float, str]
) -> None:
    for condition in conditions:
        write_trial(tmp_path, condition, "edit", 1, straight(20.0, 4.0))
    axes = throughput(tmp_path)
    assert axes is not None and axes.get_xscale() == scale
    assert list(axes.lines[0].get_xdata()) == pytest.approx(list(places))
    assert list(axes.get_xticks()) == pytest.approx(list(places))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(places.values())
    low, high = axes.get_xlim()
    assert low < min(places) and max(places) < high


def test_there_is_no_throughput_before_anything_was_measured(tmp_path: Path) -> None:
    write_trial(tmp_path, "100mbit", "edit", 1, [], state="failed")
    planned = [("100mbit", "edit", 1), ("30mbit", "edit", 1)]
    assert throughput(tmp_path, planned) is None
    write_trial(tmp_path, "30mbit", "edit", 1, straight(20.0, 4.0))
    axes = throughput(tmp_path, planned)
    assert axes is not None and list(axes.lines[0].get_xdata()) == [30]


@pytest.mark.parametrize(
    ("second", "thick"),
    [
        ([(0, 0.0, 8.0), (10, 30.0, 5.0)], [8.0, 4.5]),
        ([(0, 0.0, 8.0), (5, 15.0, 6.0), (10, 30.0, 5.0)], [8.0, 4.5]),
        ([(5, 15.0, 6.0)], [8.0, 4.0]),
    ],
    ids=["as many", "more", "others"],
)
def test_the_thick_curve_is_the_median_at_the_steps_that_all_seeds_have_or_else_the_first(
    tmp_path: Path, second: list[tuple[int, float, float]], thick: list[float]
) -> None:
    write_trial(tmp_path, "plain", "edit", 1, [validation(0, 0.0, 8.0), validation(10, 20.0, 4.0)])
    write_trial(tmp_path, "plain", "edit", 2, [validation(*point) for point in second])
    axes = losses(tmp_path)
    assert list(labeled(axes, "edit").get_ydata()) == thick
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[8.0, 4.0], [loss for *_, loss in second]]


@pytest.mark.parametrize(("cost", "points"), [("seconds", 11), ("tokens", 11), ("bytes", 9)])
def test_the_thick_curve_of_seeds_with_few_steps_in_common_follows_them_all(
    tmp_path: Path, cost: str, points: int
) -> None:
    """Only the first validation is at the same step for all seeds, as when rounds last a number of seconds. Points at 0
    bytes are left out, so curves over bytes begin at steps 10, 13 and 16."""
    for seed, (shift, last) in enumerate([(0, 100), (3, 101), (6, 102)], 1):
        lines = []
        for step in [0, *range(10 + shift, 100, 10), last]:
            point = validation(step, 2.0 * step, 4.0 + 40 / (step + 10) + 0.1 * (seed - 2))
            lines += [logged(step, 2.0 * step, 1e6 * step), point]
        write_trial(tmp_path, "plain", "edit", seed, lines)
    axes = losses(tmp_path, cost)
    thick, seeds = labeled(axes, "edit"), axes.lines[:3]
    costs, values = thick.get_xdata(), thick.get_ydata()
    assert len(values) == points and costs[-1] == seeds[0].get_xdata()[-1], "it ends with the seed that ends first"
    of_seeds = [np.interp(costs, line.get_xdata(), line.get_ydata()) for line in seeds]
    assert values == pytest.approx(np.median(of_seeds, axis=0))
    assert axes.get_ylim()[1] < 6, "the axis ends at the loss after a quarter of the validations"


def test_the_target_is_drawn_where_there_is_one(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "synchronous", 1, straight(10.0, 4.0))
    write_trial(tmp_path, "plain", "edit", 1, straight(10.0, 5.0))
    assert [text.get_text() for text in losses(tmp_path).texts] == ["target 4.000"]
    write_trial(tmp_path, "thin", "synchronous", 1, straight(10.0, None))
    write_trial(tmp_path, "thin", "edit", 1, straight(10.0, 5.0))
    axes = losses(tmp_path / "thin")
    assert not axes.texts and list(labeled(axes, "edit").get_ydata()) == [8.0, 5.0]
    assert axes.get_ylim() == pytest.approx((5.0 - 0.18, 8.0 + 0.18)), "from the lowest loss to the early losses"


@pytest.mark.parametrize("least", [26e6, 5e6], ids=["less than a decade", "one power of ten"])
def test_a_logarithmic_axis_of_a_short_range_has_numbers(tmp_path: Path, least: float) -> None:
    for run, sent in (("edit", least), ("diloco", 65e6)):
        lines = [logged(4, 9.0, sent), validation(4, 9.0, 4.5), logged(5, 10.0, 1.1 * sent), validation(5, 10.0, 4.0)]
        write_trial(tmp_path, "lan", run, 1, lines)
    axes = losses(tmp_path, "bytes")
    low, high = axes.get_xlim()
    assert axes.get_xscale() == "log" and len([tick for tick in axes.get_xticks() if low < tick < high]) >= 2


@pytest.mark.filterwarnings("error::UserWarning")
def test_names_of_folders_are_shown_as_they_are(tmp_path: Path) -> None:
    runs = ["_lr", "lr_$5_$6"]
    for condition in ("$_$", "lag_$1_$", "lag_$2_$"):
        for run in runs:
            path = write_trial(tmp_path, condition, run, 1, straight(20.0, 4.0))
            write_trace(path, "unlimited", "diloco")
    results = gather(load_trials([tmp_path]))
    figures = [draw_throughput(results, *find_sweeps(list(results.targets)))]
    figures += [draw_loss(results, "$_$", "tokens"), draw_time(results, "$_$"), draw_timelines(results, "$_$")]
    for figure in figures:
        assert figure is not None
        figure.draw_without_rendering()  # raises an error at a formula
    for figure in figures[:2]:
        names = [text.get_text().replace(r"\$", "$").lstrip("\u200b") for text in figure.legends[0].get_texts()]
        assert names == runs


def test_a_bar_of_the_training_time_is_of_one_seed(tmp_path: Path) -> None:
    """The medians of the parts over the seeds would add up to 94 s, which is no seed's time."""
    for seed, (seconds, exposed, waited) in enumerate([(99.0, 39.0, 30.0), (100.0, 30.0, 5.0), (101.0, 21.0, 15.0)]):
        write_trial(tmp_path, "plain", "edit", seed, [logged(10, seconds, 1000.0, exposed, waited)])
    write_trial(tmp_path, "plain", "diloco", 1, [logged(10, 50.0, 1000.0, 10.0, 0.0)])
    figure = draw_time(gather(load_trials([tmp_path]), baseline="edit"), "plain")
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == ["100.0 s, 30 % idle", "50.0 s, 20 % idle"]
