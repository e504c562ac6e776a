"""The sentence on top, the timelines' windows, and the files of a report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from llmtrain.compare import formatting
from llmtrain.compare.aggregate import gather
from llmtrain.compare.page import Lines, Page, PageSection, Table, Text, markdown
from llmtrain.compare.plots import styles
from llmtrain.compare.report import html, write_report
from llmtrain.compare.results import Span, load_trials
from llmtrain.compare.timeline import synchronizations, window_seconds, window_start
from llmtrain.compare.verdict import Verdict, verdict
from tests.unit.written_trials import (
    METHODS,
    logged,
    straight,
    validation,
    write_comparison,
    write_run,
    write_trial,
)

SYNCHRONOUS = [(100.0, 4.0), (110.0, 4.0), (120.0, 4.0)]


def write(folder: Path, condition: str = "plain", **runs: list[tuple[float, float | None]]) -> None:
    """Straight curves from a loss of 8 by (seconds, final loss) of each seed; edit sends a fiftieth."""
    for run, seeds in runs.items():
        for seed, (seconds, loss) in enumerate(seeds, 1):
            lines = straight(seconds, loss, sent=20.0 if run == "edit" else 1000.0)
            write_trial(folder, condition, run, seed, lines)


def said(folder: Path, **options) -> Verdict:
    return verdict(gather(load_trials([folder]), **options))


def test_the_winner_with_its_seeds_range_and_bytes(tmp_path: Path) -> None:
    write(tmp_path, "100mbit", synchronous=SYNCHRONOUS, edit=[(20.0, 4.0), (22.0, 4.0), (25.0, 4.0)])
    assert said(tmp_path).sentence == (
        "Under 100mbit, edit reached synchronous's final loss 4.000 in 22 s, 5.0 times as fast as synchronous "
        "(3 seeds, 4.0 to 6.0), with 2.0 % of its bytes."
    )
    assert said(tmp_path).details == ()


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)], edit=[(25.0, 4.0)])
    assert said(tmp_path).sentence == (
        "Under plain, edit reached synchronous's final loss 4.000 in 25 s, 4.0 times as fast as synchronous "
        "(one seed: chance is not excluded), with 2.0 % of its bytes."
    )


def test_losers_are_listed(tmp_path: Path) -> None:
    write(
        tmp_path,
        synchronous=SYNCHRONOUS,
        edit=[(20.0, 4.0), (22.0, 4.0), (25.0, 4.0)],
        slow=[(220.0, 4.0)] * 3,
        same=[(105.0, 4.0), (119.0, 4.0), (130.0, 4.0)],
        worse=[(10.0, 6.0)] * 3,
        some=[(10.0, 4.0), (10.0, 4.0), (10.0, 5.0)],
        second=[(50.0, 4.0)] * 3,
    )
    write_trial(tmp_path, "plain", "broken", 1, [], state="failed")
    assert said(tmp_path).details == (
        "Slower than the baseline: slow (0.50 times as fast); did not reach it: worse (ended at 6.000, there 5.5 times as fast); "
        "mixed (sooner in fewer seeds, or later in more): some (11 times as fast); "
        "no difference seen: same (0.92 times as fast); faster too: second (2.2 times as fast); not finished: broken (1 failed).",
    )


def test_between_leaders_no_difference_may_be_seen(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(20.0, 4.0), (25.0, 4.0)], diloco=[(24.0, 4.0), (28.0, 4.0)])
    assert said(tmp_path).sentence.endswith("; between it and diloco no difference was seen.")


def test_ranges_that_overlap_win_nothing(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(50.0, 4.0), (60.0, 4.0), (101.0, 4.0)])
    assert said(tmp_path) == Verdict(
        "Under plain, no run was seen to reach synchronous's final loss 4.000 sooner than synchronous itself, in 110 s (3 seeds).",
        ("No difference seen: edit (1.83 times as fast).",),
    )


def test_who_does_not_reach_it_may_have_come_far_sooner(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)], edit=[(10.0, 5.0)], co2=[(5.0, 6.0)])
    assert said(tmp_path).sentence == (
        "Under plain, no run was seen to reach synchronous's final loss 4.000 sooner than synchronous itself, in 100 s (1 seed); "
        "but edit ended at 5.000 and got there 7.5 times as fast as synchronous, which was then in the middle of its schedule."
    )


def test_a_baseline_that_failed(tmp_path: Path) -> None:
    write(tmp_path, edit=[(10.0, 5.0)], diloco=[(10.0, 5.5)])
    write_trial(tmp_path, "plain", "synchronous", 1, straight(50.0, 6.0), state="failed")
    assert said(tmp_path).sentence == (
        "Under plain, the baseline synchronous has not finished (synchronous: 1 failed), so nothing is measured against it; "
        "edit ended lowest, at 5.000."
    )
    assert said(tmp_path, target=6.0).sentence == (
        "Under plain, the baseline synchronous did not reach a validation loss of 6.000; edit reached it soonest, in 6.7 s."
    )


def test_a_baseline_whose_loss_is_not_finite(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(10.0, None)], edit=[(10.0, 5.0), (10.0, 5.2)], diloco=[(10.0, 5.1), (10.0, 5.3)])
    assert said(tmp_path).sentence == (
        "Under plain, the baseline synchronous has no finite final validation loss, so nothing is measured against it; "
        "edit ended lowest, at 5.100, but ranges over seeds overlap."
    )


def test_a_target_that_nobody_reaches(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(10.0, 4.0)], edit=[(10.0, 5.0)])
    assert said(tmp_path, target=3.0).sentence == (
        "Under plain, no run reached a validation loss of 3.000; synchronous ended lowest, at 4.000."
    )


def test_nobody_with_a_finite_loss(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(10.0, None)], edit=[(10.0, None)])
    assert said(tmp_path).sentence == (
        "Under plain, the baseline synchronous has no finite final validation loss, so nothing is measured against it; "
        "no run has a finite validation loss."
    )


def test_who_did_not_reach_it_may_have_no_final_loss(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)], edit=[(50.0, 5.0)])
    write_trial(tmp_path, "plain", "cut", 1, straight(10.0, 6.0), state="stopped")
    assert said(tmp_path).details == (
        "Did not reach it: cut (no final loss), edit (ended at 5.000, there 1.50 times as fast); not finished: cut (1 stopped).",
    )


def test_a_run_of_which_few_seeds_were_sooner_has_no_speed_up(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(10.0, 4.0), (10.0, 5.0), (10.0, 5.0)])
    assert said(tmp_path).details == ("Mixed (sooner in fewer seeds, or later in more): edit.",)


def test_a_run_alone_that_was_stopped(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "edit", 1, straight(10.0, 6.0), state="stopped")
    assert said(tmp_path).sentence == (
        "Under plain, there is nothing to compare: of 1 runs only edit was measured, and it was stopped (1 seed)."
    )


def test_a_run_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", straight(10.0, 4.0), "edit")
    assert said(tmp_path).sentence == (
        "As run, there is nothing to compare: of 1 runs only mine has finished, at a validation loss of 4.000 (1 seed)."
    )


def test_nobody_finished(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "edit", 1, [], state="failed")
    planned = [("plain", "edit", 1), ("plain", "edit", 2)]
    assert said(tmp_path, planned=planned).sentence == (
        "Under plain, no run has finished (edit: 1 failed, 1 not yet run), so there is nothing to compare."
    )


def test_several_conditions_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, "30mbit", synchronous=[(900.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2)
    write(tmp_path, "100mbit", synchronous=[(300.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2)
    write(tmp_path, "unlimited", synchronous=[(90.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2)
    planned = [(condition, "edit", 1) for condition in ("unlimited", "100mbit", "30mbit", "10mbit")]
    verdict = said(tmp_path, planned=planned)
    assert verdict.sentence == (
        "edit under 100mbit (3.0 times as fast) and edit under 30mbit (9.0 times as fast) reached synchronous's final loss "
        "sooner than synchronous; under unlimited no run was seen to reach synchronous's final loss sooner than synchronous itself; "
        "nothing can be said yet of 10mbit."
    )
    assert len(verdict.details) == 4
    assert verdict.details[0].endswith("Slower than the baseline: edit (0.90 times as fast).")


def test_one_seed_of_several_conditions_is_said(tmp_path: Path) -> None:
    for condition in ("a", "b"):
        write(tmp_path, condition, synchronous=[(900.0, 4.0)], edit=[(100.0, 4.0)])
    assert said(tmp_path).sentence.endswith("sooner than synchronous, with one seed, which does not exclude chance.")


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (formatting.seconds, 4.23, "4.2 s"),
        (formatting.seconds, 119.4, "119 s"),
        (formatting.seconds, 130.0, "2.2 min"),
        (formatting.seconds, 7300.0, "2.0 h"),
        (formatting.size, 3244840800, "3.24 GB"),
        (formatting.size, 512, "512 B"),
        (formatting.size, 2.345e12, "2.35 TB"),
        (formatting.size, 4.2e15, "4200 TB"),
        (formatting.count, 999.7, "1 k"),
        (formatting.percent, 0.0213, "2.1 %"),
        (formatting.percent, 0.97, "97 %"),
        (formatting.percent, 0.0001, "less than 0.1 %"),
        (formatting.times, 0.966, "0.97"),
        (formatting.times, 5.24, "5.2"),
        (formatting.listed, ["a", "b", "c"], "a, b and c"),
    ],
)
def test_numbers_as_words(show, value, text: str) -> None:
    assert show(value) == text


def spans_of(every: int, kind: str, steps: int = 30) -> dict[int, list[Span]]:
    """Steps of a second on one rank, with a synchronization of half a second in every so many and a glance in all."""
    made = []
    for step in range(steps):
        made.append(Span("step", "", step, float(step), step + 1.0))
        made.append(Span("exposed", "averaging gradients", step, step + 0.4, step + 0.40001))
        if step % every == 0:
            made.append(Span(kind, "", step, step + 0.5, step + 1.0))
            made.append(Span("exposed", "", step, step + 0.9, step + 1.0))
    return {0: made}


@pytest.mark.parametrize("kind", ["exposed", "message"])
def test_a_synchronization_a_step_that_has_one(kind: str) -> None:
    assert synchronizations(spans_of(10, kind)) == [0.5, 10.5, 20.5]


def test_windows_hold_two_rounds_of_the_slowest_run_unless_it_dwarfs_the_others() -> None:
    ten, five, one = (spans_of(every, "message") for every in (10, 5, 1))
    assert window_seconds([ten]) == pytest.approx(20 * 1.24)
    assert window_seconds([ten, five]) == pytest.approx(20 * 1.24)
    assert window_seconds([ten, one, one]) == pytest.approx(3 * 2 * 1.24)
    assert window_start(ten, 12.5) == pytest.approx(10.5 - 0.12 * 12.5)
    assert window_start(ten, 29.0) == 1.0


def test_every_run_has_a_style_of_its_own(tmp_path: Path) -> None:
    for number in range(12):
        write_trial(tmp_path, "plain", f"run{number:02d}", 1, straight(10.0, 4.0))
    drawn = styles(gather(load_trials([tmp_path])))
    assert len(set(drawn.values())) == 12 and drawn["run00"].color == "black"


def test_pages_say_the_same_in_markdown_and_html(tmp_path: Path) -> None:
    table = Table(("run", "loss"), (("a|b", "4.0 (3.9 to 4.1)"),))
    blocks = [Text("of `x=<1>`"), table, Lines(("one", "  <two>"))]
    page = Page("T", "It won.", ("others",), (PageSection("S", blocks),))
    assert markdown(page) == (
        "# T\n\n**It won.**\n\n- others\n\n## S\n\nof `x=<1>`\n\n| run | loss |\n| --- | ---: |\n| a\\|b | 4.0 (3.9 to 4.1) |"
        "\n\n    one\n      <two>\n"
    )
    written = html(page, tmp_path)
    assert "<p>of <code>x=&lt;1&gt;</code></p>" in written and "<pre>one\n  &lt;two&gt;</pre>" in written
    assert '<span class="main">4.0</span><span class="range">3.9 to 4.1</span>' in written


def test_a_report_of_everything(tmp_path: Path) -> None:
    planned = write_comparison(tmp_path, conditions=("100mbit", "30mbit"), seeds=(1,))
    path = write_report(load_trials([tmp_path]), tmp_path, planned=planned, command="python -m llmtrain compare x.yaml")
    text, page = (tmp_path / "report.md").read_text(), path.read_text()
    assert path == tmp_path / "report.html"
    titles = [
        *("Runs", "Loss against tokens, time and bytes", "Where the time went", "Timelines"),
        *("Bytes against interface counters", "Trials that did not finish", "How it was made"),
    ]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == re.findall(r"<h2>(.*)</h2>", page) == titles
    linked = re.findall(r"\]\((plots/[^)]*)\)", text)
    assert len(linked) == 10 and {f"plots/{file.name}" for file in (tmp_path / "plots").iterdir()} == set(linked)
    for picture in linked:
        with Image.open(tmp_path / picture) as image:
            image.verify()
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 10
    assert not re.search(r"<script|<link|src=\"(?!data:)|https?://", page)
    for needed in (
        *("1.048", "Connection reset by peer", "exit codes of the hosts: 1, 1, -9, 1", "0123abc", "not yet run"),
        *("python -m llmtrain compare x.yaml", "30 Mbit/s between 4 hosts", "sync.method=edit", *METHODS),
    ):
        assert needed in text and needed in page, needed
    assert "run.seed=" not in text


def test_reports_of_little(tmp_path: Path) -> None:
    """One trial that broke at once; then one with a loss that was never finite and no synchronization."""
    write_trial(tmp_path, "plain", "edit", 1, [], state="failed", last_lines=["gone"])
    text = (write_report(load_trials([tmp_path]), tmp_path).parent / "report.md").read_text()
    assert "plots/" not in text and "    gone" in text and "| edit | 1 failed | – |" in text
    lines = [validation(0, 0.0, None), logged(10, 5.0, sent=0.0), validation(10, 5.0, None)]
    write_trial(tmp_path, "plain", "solo", 1, lines)
    text = (write_report(load_trials([tmp_path]), tmp_path).parent / "report.md").read_text()
    assert "| solo | 1 done | – | – |" in text and "plots/time-plain.png" in text and "plots/loss" not in text


def test_a_report_names_a_given_target_and_shows_no_last_lines_where_there_are_none(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "edit", 1, [], state="failed", exit_codes=[1, None])
    text = (write_report(load_trials([tmp_path]), tmp_path, target=6.0).parent / "report.md").read_text()
    assert "- Baseline: edit. Target: a validation loss of 6.000, as given." in text
    assert "Failed, exit codes of the hosts: 1, none; it trained no step.\n\n## How it was made" in text


@pytest.mark.filterwarnings("error::UserWarning")
def test_losses_of_one_validation_each_leave_room_for_the_target(tmp_path: Path) -> None:
    """The baseline, whose loss is the target, ends far above all others: its line would be outside of the picture."""
    for run, loss in {"synchronous": 5.95, "edit": 5.78, "diloco": 5.69, "palsgd": 5.64}.items():
        write_trial(tmp_path, "plain", run, 1, straight(20, loss)[1:])
    write_report(load_trials([tmp_path]), tmp_path, "synchronous")
    assert (tmp_path / "plots/loss_bytes-plain.png").exists()


def test_a_table_of_seeds_that_got_there_and_that_did_not(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)] * 3, edit=[(20.0, 4.0), (10.0, 4.0), (30.0, 4.4)])
    text = (write_report(load_trials([tmp_path]), tmp_path).parent / "report.md").read_text()
    (row,) = re.findall(r"^\| edit \| 3 done .*$", text, re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == ["4.000 (4.000 to 4.400)", "20 s (10 s to 20 s in 2 of 3)", "5.0 × (5.0 to 10), mixed"]
