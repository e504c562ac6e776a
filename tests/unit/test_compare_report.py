"""Tests of reports: headline, tables, windows of timelines, and files."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from llmtrain.compare import report
from llmtrain.compare.comparison import ComparedRunSection, TrialSpec
from llmtrain.compare.measures import Results, gather
from llmtrain.compare.plots import styles, synchronizations, window_seconds, window_start
from llmtrain.compare.report import html_body, write_report
from llmtrain.compare.results import load_trials
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
    """Write trials with straight loss curves from 8. `runs` maps each run to (seconds, final loss) of its seeds. edit sends a
    fiftieth of the bytes of other runs."""
    for run, seeds in runs.items():
        for seed, (seconds, loss) in enumerate(seeds, 1):
            lines = straight(seconds, loss, sent=20.0 if run == "edit" else 1000.0)
            write_trial(folder, condition, run, seed, lines)


def results_of(folder: Path, **options) -> Results:
    return gather(load_trials([folder]), **options)


def headline(folder: Path, **options) -> str:
    return report.headline(results_of(folder, **options))


def rows(folder: Path, **options) -> dict[str, dict[str, str]]:
    """Return the rows of the table of the first condition, by run."""
    results = results_of(folder, **options)
    table = report.runs_table(results, next(iter(results.targets)))
    return {row["run"]: row for row in table.to_dict("records")}


def test_the_fastest_with_its_range_over_seeds_and_its_bytes(tmp_path: Path) -> None:
    write(tmp_path, "100mbit", synchronous=SYNCHRONOUS, edit=[(25.0, 4.0), (22.0, 4.0), (20.0, 4.0)])
    assert headline(tmp_path) == (
        "Fastest to synchronous's final loss 4.000: edit under 100mbit, 5.0 times as fast as synchronous (4.0 to 6.0, 3 seeds)"
    )
    assert rows(tmp_path)["edit"] == {
        "run": "edit",
        "trials": "3 done",
        "outcome": "faster",
        "final loss": "4.000",
        "time to loss 4.000": "22 s (20 s to 25 s)",
        "speed-up": "5.0 (4.0 to 6.0, 3 seeds)",
        "speed-up to its own final loss": "5.0 (4.0 to 6.0, 3 seeds)",
        "tokens/s": "45.5 (40 to 50)",
        "sent in total": "20 B",
        "sent to loss 4.000": "20 B",
        "of the baseline's bytes": "2 % (3 seeds)",
        "tokens to loss 4.000": "1 k",
        "training time": "22 s (20 s to 25 s)",
    }


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)], edit=[(25.0, 4.0)])
    assert headline(tmp_path) == (
        "Fastest to synchronous's final loss 4.000: edit under plain, 4.0 times as fast as synchronous "
        "(1 seed: chance is not excluded)"
    )
    edit = rows(tmp_path)["edit"]
    assert (edit["outcome"], edit["speed-up"]) == ("faster (1 seed)", "4.0 (1 seed)")


def test_the_headline_names_failed_trials(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(21.0, 4.0), (20.0, 4.0)])
    for run, seed in (("synchronous", 4), ("synchronous", 5), ("edit", 3)):
        write_trial(tmp_path, "plain", run, seed, straight(10.0, None), state="failed")
    assert headline(tmp_path).endswith("(4.8 to 5.5, 2 seeds; edit: 1 failed; synchronous: 2 failed)")
    write_trial(tmp_path, "plain", "edit", 4, straight(10.0, None), state="failed")
    assert headline(tmp_path) == "No run was significantly faster than the baseline synchronous"


def test_outcomes(tmp_path: Path) -> None:
    write(
        tmp_path,
        synchronous=SYNCHRONOUS,
        edit=[(20.0, 4.0), (22.0, 4.0), (25.0, 4.0)],
        slow=[(220.0, 4.0)] * 3,
        same=[(125.0, 4.0), (100.0, 4.0), (120.0, 4.0)],
        worse=[(10.0, 6.0)] * 3,
        some=[(10.0, 4.0), (10.0, 4.0), (10.0, 5.0)],
        few=[(10.0, 4.0), (10.0, 5.0), (10.0, 5.0)],
        second=[(50.0, 4.0)] * 3,
    )
    write_trial(tmp_path, "plain", "broken", 1, [], state="failed")
    write_trial(tmp_path, "plain", "cut", 1, straight(10.0, 6.0), state="stopped")
    columns = ("trials", "outcome", "speed-up", "speed-up to its own final loss")
    planned = [("plain", "broken", seed) for seed in (1, 2)]
    assert {run: tuple(row[column] for column in columns) for run, row in rows(tmp_path, planned=planned).items()} == {
        "synchronous": ("3 done", "baseline", "–", "–"),
        "edit": ("3 done", "faster", *["5.0 (4.8 to 5.0, 3 seeds)"] * 2),
        "slow": ("3 done", "slower", *["0.50 (0.45 to 0.55, 3 seeds)"] * 2),
        "same": ("3 done", "not significant", *["1.00 (0.80 to 1.10, 3 seeds)"] * 2),
        "worse": ("3 done", "not reached", "–", "5.5 (5.0 to 6.0, 3 seeds)"),
        "some": ("3 done", "mixed", "10 (10 to 11, 2 of 3 seeds)", "10 (9.0 to 11, 3 seeds)"),
        "few": ("3 done", "mixed", "10 (1 of 3 seeds)", "9.0 (8.2 to 10, 3 seeds)"),
        "second": ("3 done", "faster", *["2.2 (2.0 to 2.4, 3 seeds)"] * 2),
        "broken": ("1 failed, 1 not yet run", "not finished 2 of 2", "–", "–"),
        "cut": ("1 stopped", "not reached", "–", "–"),
    }


def test_the_leader_may_not_be_significantly_faster_than_others(tmp_path: Path) -> None:
    """The leader is faster than `diloco` and `second` with both seeds. Only for `second`, whose ratio to it is the same in both, this
    is not due to chance, although their ranges overlap."""
    runs = {"edit": (20.0, 25.0), "diloco": (21.0, 28.0), "second": (24.0, 30.0)}
    write(tmp_path, synchronous=SYNCHRONOUS, **{run: [(end, 4.0) for end in ends] for run, ends in runs.items()})
    write_trial(tmp_path, "plain", "other_seed", 3, straight(30.0, 4.0))
    assert headline(tmp_path).endswith("2 seeds); not significantly faster than diloco, other_seed")


@pytest.mark.parametrize(
    ("edit", "target"),
    [([(101.0, 4.0), (60.0, 4.0), (50.0, 4.0)], None), ([(10.0, 5.0)], None), ([(10.0, 5.0)], 3.0)],
    ids=["one seed is slower", "ends above", "nobody reaches it"],
)
def test_nobody_was_faster(tmp_path: Path, edit: list[tuple[float, float]], target: float | None) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=edit)
    assert headline(tmp_path, target=target) == "No run was significantly faster than the baseline synchronous"


def test_the_headline_names_seeds_that_miss_the_target(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0), (110.0, 4.0), (120.0, 4.1)], edit=[(20.0, 4.0)] * 3)
    assert headline(tmp_path, target=4.0).endswith("(5.0 to 5.5, 2 of 3 seeds; synchronous: 2 of 3 reached it)")
    assert rows(tmp_path, target=4.0)["edit"]["speed-up"] == "5.2 (5.0 to 5.5, 2 of 3 seeds)"


def test_a_run_is_faster_than_a_baseline_that_mostly_misses_the_target(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(10.0, 4.0), (10.0, 5.0), (10.0, 5.0)], edit=[(5.0, 4.0)] * 3)
    assert rows(tmp_path, target=4.0)["edit"]["outcome"] == "faster (1 seed)"
    assert headline(tmp_path, target=4.0) == (
        "Fastest to a validation loss of 4.000: edit under plain, 2.0 times as fast as synchronous "
        "(1 of 3 seeds: chance is not excluded; synchronous: 1 of 3 reached it)"
    )


def test_the_headline_prefers_a_speed_up_with_an_interval_to_one_of_a_single_seed(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(10.0, 4.0)], diloco=[(50.0, 4.0)] * 3, last=[(60.0, 4.0)] * 2)
    assert rows(tmp_path)["edit"]["outcome"] == "faster (1 seed)"
    assert headline(tmp_path) == (
        "Fastest to synchronous's final loss 4.000: diloco under plain, 2.2 times as fast as synchronous (2.0 to 2.4, 3 seeds); "
        "not significantly faster than edit"
    )
    write(tmp_path, "30mbit", synchronous=[(900.0, 4.0)], edit=[(10.0, 4.0)])
    assert "diloco under plain" in headline(tmp_path)


def test_there_is_nothing_to_compare(tmp_path: Path) -> None:
    nothing = "Nothing to compare: in no seed did both the baseline {} and another run reach the target"
    write_run(tmp_path / "alone" / "mine", straight(10.0, 4.0), "edit")
    assert headline(tmp_path / "alone") == nothing.format("mine")
    write_trial(tmp_path / "failed", "plain", "edit", 1, [], state="failed")
    planned = [("plain", "edit", 1), ("plain", "edit", 2)]
    assert headline(tmp_path / "failed", planned=planned) == nothing.format("edit")
    write(tmp_path / "nan", synchronous=[(10.0, None)], edit=[(10.0, None)])
    assert headline(tmp_path / "nan") == nothing.format("synchronous")
    assert rows(tmp_path / "nan")["edit"]["outcome"] == "not comparable"
    write(tmp_path / "broken", edit=[(10.0, 5.0)], diloco=[(10.0, 5.5)])
    write_trial(tmp_path / "broken", "plain", "synchronous", 1, straight(50.0, 6.0), state="failed")
    assert headline(tmp_path / "broken") == headline(tmp_path / "broken", target=6.0) == nothing.format("synchronous")
    assert rows(tmp_path / "broken", target=6.0)["edit"]["time to loss 6.000"] == "6.7 s"


def test_the_headline_is_the_largest_speed_up_of_all_conditions(tmp_path: Path) -> None:
    write(tmp_path, "30mbit", synchronous=[(900.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2)
    write(tmp_path, "100mbit", synchronous=[(300.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2, diloco=[(90.0, 4.0)] * 2)
    write(tmp_path, "unlimited", synchronous=[(90.0, 4.0)] * 2, edit=[(100.0, 4.0)] * 2)
    planned = [(condition, "edit", 1) for condition in ("unlimited", "100mbit", "30mbit", "10mbit")]
    assert headline(tmp_path, planned=planned) == (
        "Fastest to synchronous's final loss 4.000: edit under 30mbit, 9.0 times as fast as synchronous (9.0 to 9.0, 2 seeds)"
    )
    assert rows(tmp_path, planned=planned)["edit"]["outcome"] == "slower"


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (report.seconds, 4.23, "4.2 s"),
        (report.seconds, 119.4, "119 s"),
        (report.seconds, 130.0, "2.2 min"),
        (report.seconds, 7300.0, "2.0 h"),
        (report.size, 3244840800, "3.24 GB"),
        (report.size, 512, "512 B"),
        (report.size, 2.346e12, "2.35 TB"),
        (report.size, 4.2e15, "4.2 PB"),
        (report.count, 999.7, "1 k"),
        (report.percent, 0.0213, "2.1 %"),
        (report.percent, 0.97, "97 %"),
        (report.percent, 0.0001, "0.01 %"),
        (report.percent, 1.234, "120 %"),
        (report.ratio, 0.966, "0.97"),
        (report.ratio, 5.24, "5.2"),
    ],
)
def test_numbers_as_words(show, value, text: str) -> None:
    assert show(value) == text


def spans_of(every: int, kind: str, steps: int = 30) -> pd.DataFrame:
    """Return spans of one rank with steps of one second. Every step has a negligible exposed wait; one step in `every`
    begins a synchronization of half a second, in a span of `kind`."""
    made = []
    for step in range(steps):
        made.append((0, "step", step, float(step), step + 1.0))
        made.append((0, "exposed", step, step + 0.4, step + 0.40001))
        if step % every == 0:
            made.append((0, kind, step, step + 0.5, step + 1.0))
            made.append((0, "exposed", step, step + 0.9, step + 1.0))
    return pd.DataFrame(made, columns=["rank", "kind", "step", "start", "end"])


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
    drawn = styles(results_of(tmp_path))
    assert len(set(map(str, drawn.values()))) == 12 and drawn["run00"]["color"] == "black"


def test_markdown_is_shown_as_it_is_in_html(tmp_path: Path) -> None:
    name = report.literal("a*b* <c> `d` [e](f)")
    html = html_body(
        f"# {name}\n\n| run | loss |\n| --- | ---: |\n| x\\|y | 4.0 (3.9 to 4.1) |\n\n    one\n      <two>\n", tmp_path
    )
    assert "<h1>a*b* &lt;c&gt; `d` [e](f)</h1>" in html and "<td>x|y</td>" in html
    assert "<pre><code>one\n  &lt;two&gt;\n</code></pre>" in html
    assert '<span class="main">4.0</span><span class="range">3.9 to 4.1</span></td>' in html


def test_a_report_of_everything(tmp_path: Path) -> None:
    planned = write_comparison(tmp_path, conditions=("100mbit", "30mbit"), seeds=(1,))
    path = write_report(results_of(tmp_path, planned=planned), tmp_path, "llmtrain compare x.yaml")
    text, page = (tmp_path / "report.md").read_text(), path.read_text()
    assert path == tmp_path / "report.html"
    titles = [
        *("Runs", "Loss against tokens, time and bytes", "Where the time went", "Timelines"),
        *("Bytes against interface counters", "Trials that did not finish", "How this report was made"),
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
        *("1.048", "Connection reset by peer", "Exit codes of the hosts: 1, 1, -9, 1", "0123abc", "not yet run"),
        *("llmtrain compare x.yaml", "30 Mbit/s between 4 hosts", "sync.method=edit", *METHODS),
    ):
        assert needed in text and needed in page, needed
    assert "run.seed=" not in text


def test_reports_of_little(tmp_path: Path) -> None:
    """The first report has one trial, which failed at once. The second report also has a trial whose loss was never
    finite and which sent nothing."""
    write_trial(tmp_path, "plain", "edit", 1, [], state="failed", last_lines=["gone"])
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    assert "plots/" not in text and "    gone" in text and "| edit | 1 failed | baseline | – |" in text
    lines = [validation(0, 0.0, None), logged(10, 5.0, sent=0.0), validation(10, 5.0, None)]
    write_trial(
        tmp_path, "plain", "solo", 1, lines, missed=["the pause of host 0 at 9 s", "the death of host 1 at 20 s"]
    )
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    assert (
        "| solo | 1 done | not comparable | – | – |" in text
        and "plots/time-plain.png" in text
        and "plots/loss" not in text
    )
    said = "\n\nWarning: solo with seed 1 ended before the pause of host 0 at 9 s and the death of host 1 at 20 s, which did not"
    assert said in text and text.count("ended before") == 1


def test_a_report_names_trials_beside_other_work(tmp_path: Path) -> None:
    """Failed trials are left out, because their own processes may count as other programs."""
    loads = {("edit", 1): 0.23, ("edit", 2): 0.04, ("diloco", 1): 0.061, ("diloco", 2): None, ("wagma", 1): 0.9}
    for (run, seed), load in loads.items():
        state = "failed" if run == "wagma" else "done"
        write_trial(tmp_path, "plain", run, seed, straight(60, 4.0), other_load=load, state=state)
    write_trial(tmp_path, "thin", "edit", 1, straight(60, 4.0), other_load=0.05)
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    [warning] = [line for line in text.split("\n\n") if "Warning: other" in line]
    assert " ".join(warning.split()) == (
        "Warning: other programs took CPU time of the machine during diloco with seed 1 (6.1 %); edit with seed 1 (23 %). "
        "Their times may be too long."
    )


def test_a_report_names_a_given_target_and_shows_no_last_lines_where_there_are_none(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "edit", 1, [], state="failed", exit_codes=[1, None])
    text = (write_report(results_of(tmp_path, target=6.0), tmp_path).parent / "report.md").read_text()
    assert "- Baseline: edit. Target: a given validation loss of 6.000." in text
    assert (
        "State: failed. Exit codes of the hosts: 1, none. Last logged step: none.\n\n## How this report was made"
        in text
    )


def test_two_sweeps_of_bandwidths_have_a_picture_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("draw_loss", "draw_time"):
        monkeypatch.setattr(report.plots, other, lambda *_: None)
    for condition in ("100mbit", "30mbit", "100mbit_slow", "30mbit_slow"):
        write(tmp_path, condition, edit=[(20.0, 4.0)])
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    captions, paths = zip(*re.findall(r"!\[(Tokens per second: .*)\]\((plots/.*)\)", text), strict=True)
    rate = "Tokens per second: bandwidth between hosts (Mbit/s)"
    assert captions == (rate, f"{rate}, …mbit_slow") and len(set(paths)) == 2
    assert all((tmp_path / path).exists() for path in paths)


@pytest.mark.filterwarnings("error::UserWarning")
def test_losses_of_one_validation_each_leave_room_for_the_target(tmp_path: Path) -> None:
    """The baseline, whose final loss is the target, ends far above all others. The line of the target would otherwise be
    outside of the picture."""
    for run, loss in {"synchronous": 5.95, "edit": 5.78, "diloco": 5.69, "palsgd": 5.64}.items():
        write_trial(tmp_path, "plain", run, 1, straight(20, loss)[1:])
    write_report(results_of(tmp_path, baseline="synchronous"), tmp_path)
    assert (tmp_path / "plots/loss_bytes-plain.png").exists()


def test_a_table_of_seeds_that_got_there_and_that_did_not(tmp_path: Path) -> None:
    write(tmp_path, synchronous=[(100.0, 4.0)] * 3, edit=[(20.0, 4.0), (18.0, 4.0), (30.0, 4.4)])
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    cells = "mixed | 4.000 (4.000 to 4.400) | 20 s (18 s to 20 s in 2 of 3) | 5.3 (5.0 to 5.6, 2 of 3 seeds) |"
    assert f"| edit | 3 done | {cells}" in text


def test_a_report_warns_of_trials_of_several_commits(tmp_path: Path) -> None:
    for seed, commit in enumerate(("aaa", "aaa", "bbb", None), 1):
        write_trial(tmp_path, "plain", "edit", seed, [], state="failed", commit=commit)
    text = (write_report(results_of(tmp_path), tmp_path).parent / "report.md").read_text()
    assert "\n\nWarning: trials come from several commits: aaa (seeds 1, 2), bbb (seed 3).\n\n## Runs" in text
    assert "\n- Commit: aaa (seeds 1, 2), bbb (seed 3)\n" in text


def test_a_report_tells_a_run_whose_hosts_changed_from_one_whose_hosts_did_not(tmp_path: Path) -> None:
    """Both runs begin with the same overrides."""
    keys = {"recipe": "a.yaml", "overrides": ["parallel.replicas=2"]}
    section = ComparedRunSection(replicas=2, restarts=[{"after_step": 60, "replicas": 4}])
    spec = TrialSpec("plain", "grows", 1, Path("a.yaml"), (), tmp_path, section.stages(4))
    write_trial(tmp_path, "plain", "stays", 1, straight(60, 4.0), **keys)
    write_trial(tmp_path, "plain", "grows", 1, straight(60, 4.0), stages=spec.changes(), **keys)
    table = report.recipes_table(gather(load_trials([tmp_path]), "stays"))
    assert dict(zip(table["run"], table["overrides"], strict=True)) == {
        "stays": "`parallel.replicas=2`",
        "grows": "`parallel.replicas=2`, after step 60 with 4 hosts",
    }


def test_a_run_of_one_seed_is_pointed_out_beside_a_baseline_of_three(tmp_path: Path) -> None:
    for condition in ("a", "b"):
        for seed in (1, 2, 3):
            write_trial(tmp_path, condition, "synchronous", seed, straight(900.0, 4.0))
        write_trial(tmp_path, condition, "edit", 1, straight(100.0, 4.0))
    assert "1 seed: chance is not excluded" in headline(tmp_path)
