"""Tests of the benchmarks' tables and pages, with made-up results."""

from __future__ import annotations

import importlib
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest

from llmtrain.sync.methods import METHODS
from tests import ROOT
from tests.unit.test_benchmarks import row_of, write_diloco_run

pytestmark = pytest.mark.deep

methods, step_parts, stragglers = map(importlib.import_module, ("methods", "step_parts", "stragglers"))
sync_cost, table, throughput, wires = map(importlib.import_module, ("sync_cost", "table", "throughput", "wires"))
data, loops, memory = map(importlib.import_module, ("data", "loops", "memory"))
rounding, step_overhead, stream = map(importlib.import_module, ("rounding", "step_overhead", "stream"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_diloco_run(tmp_path / "run")


def test_a_methods_row(run: Path) -> None:
    row = methods.row(run)
    assert row == ("diloco", "2.0000", "7.39", "13", "0.00 GB", "300", "241", "1.23 M")
    assert len(row) == len(methods.COLUMNS)


def test_a_wires_row(run: Path) -> None:
    parameters = 100  # 2 x 3/4 x 100 x (1/2 + 4/128) = 79.6875 bytes
    row = wires.row("int4+feedback", run, parameters, fp32_loss=1.6)
    assert row == ("int4+feedback", "2.0000", "+25.00 %", "250", "80", "+213.73 %", "13")
    assert len(row) == len(wires.COLUMNS)


def test_the_lowest_number_is_bold() -> None:
    rows = [("a", "3.5"), ("b", "3.4"), ("c", "10.0")]
    assert table.lowest_in_bold(rows, 1) == [("a", "3.5"), ("b", "**3.4**"), ("c", "10.0")]


def test_markdown() -> None:
    assert table.markdown(("x", "y"), [("a", "1")]) == "| x | y |\n| --- | ---: |\n| a | 1 |"


def test_pages_name_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "train.txt"
    text.touch()
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks/methods.py"), "--source", str(text), f"--set=a={text}"])
    table.write_page(tmp_path / "page", "Title", ["Text."])
    page = (tmp_path / "page" / "README.md").read_text()
    assert page.startswith("# Title\n\n`python benchmarks/methods.py --source ../") and page.endswith("\n\nText.\n")
    assert f" {tmp_path}" not in page and f"={tmp_path}" not in page
    assert table.run_overrides(Namespace(source=str(text), validation=None))[-1] == "data.validation=null"


def test_written_results(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(methods, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(wires, "RESULTS", tmp_path / "results")
    methods.write([methods.row(run)], dict.fromkeys(METHODS, run))
    wires.write([wires.row("fp32", run, 100, 2.0)], {"fp32": run})
    written = {path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*.*")}
    logs = ("metrics.jsonl", "recipe.yaml", "summary.json")
    pages = {"methods/README.md", f"methods/{methods.PLOT}", "wires/README.md"}
    assert written == {"methods/runs.tar.xz", "wires/runs.tar.xz"} | pages
    with tarfile.open(tmp_path / "results/methods/runs.tar.xz") as archive:
        assert set(archive.getnames()) == {f"{method}/{name}" for method in METHODS for name in logs}
    assert "| diloco | **2.0000** |" in (tmp_path / "results/methods/README.md").read_text()
    for page in ("methods", "wires"):
        text = (tmp_path / "results" / page / "README.md").read_text()
        assert "All runs were trained at commit unknown." in text


def test_the_overheads_rows() -> None:
    seconds = {step_overhead.PLAIN: [1.0] * 3, step_overhead.LOCAL: [1.0, 1.1, 1.2], "trainer, sync": [2.38] * 3}
    rows = step_overhead.rows_of(seconds)
    assert rows[1] == (step_overhead.LOCAL, "1100.0", "1.100", "1.000 to 1.200", "", "")
    assert rows[2][-1] == "+0.91 %"  # (2.38 - 1.1) / 128 = 0.01 s, relative to 1.1 s
    assert all(len(row) == len(step_overhead.COLUMNS) for row in rows)


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """The sign test's interval has ranks 6 and 15 of 20 values, and 10 and 21 of 30."""
    assert step_overhead.interval_of_median(range(1, 21)) == (6, 15)
    assert step_overhead.interval_of_median(range(1, 31)) == (10, 21)
    assert step_overhead.interval_of_median(range(1, 7)) == (1, 6)
    assert step_overhead.interval_of_median(range(1, 6)) is None


def test_a_synchronizations_rows() -> None:
    local = [{"seconds": 0.1}] * 3
    turns = [
        {"seconds": 0.2 + added, "exposed": 0.04, "messages": 0.03, "bytes": 2e6, "alone": 0.02, "copied": 0.025}
        for added in (0.04, 0.05, 0.06)
    ]
    (row,) = sync_cost.rows_of("co2", 2, {sync_cost.LOCAL: local, "int8": turns})
    assert row == ("co2", "int8", "2", "50.0", "40.0 to 60.0", "40.0", "30.0", "2.00", "20.0", "2.50", "25.0", "2.00")
    assert len(row) == len(sync_cost.COLUMNS)
    offloaded = [{**turn, "copied": 0.0} for turn in turns]
    (without,) = sync_cost.rows_of("co2, offloaded", 2, {sync_cost.LOCAL: local, "int8": offloaded})
    assert without == ("co2, offloaded", *row[1:10], "", "")


def test_what_fails_is_on_the_page() -> None:
    why = loops.RowFailed("memory.py: measuring {}", "failed with exit code 1; see its output")
    task = {"engine": "zero1", "shard": 1, "precision": "fp32", "checkpoint": "no", "micro_batches": 2, "compile": True}
    failed = memory.failed_row(task, why)
    assert failed == ("zero1, compiled", "1", "fp32", "nothing", "2", why.reason, "", "")
    measured = memory.row(task, {"peak": 2e6, "predicted": 3e6})
    assert measured[:5] == failed[:5] and measured[5:] == ("2", "3", "+50.0 %")
    assert len(failed) == len(measured) == len(memory.COLUMNS)
    blank = [""] * (len(sync_cost.COLUMNS) - 4)
    row = sync_cost.failed_row("co2, offloaded", sync_cost.CHOICES["co2"], ("fp32", "int8"), why)
    assert row == ("co2, offloaded", "fp32, int8", "8", why.reason, *blank)
    slow = throughput.failed_row(row_of("fsdp2"), why)
    assert slow == ("6M", "fsdp2", "checkpoint", why.reason, *[""] * (len(throughput.COLUMNS) - 4))
    own = sync_cost.failed_row("sparseloco", sync_cost.CHOICES["sparseloco"], ("fp32", "int8"), why)
    assert own == ("sparseloco", "topk", "1", why.reason, *blank)
    sentence = table.missing_sentence({"zero3": "failed", "x": "not possible"})
    assert sentence == "Not measured: zero3 (failed); x (not possible)."
    assert table.missing_sentence({}) == ""


def test_a_method_that_fails_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = {"seconds": 0.2, "exposed": 0.04, "messages": 0.03, "bytes": 2e6, "alone": 0.02, "copied": 0.025}

    def ask(script: str, ranks: int, task: dict[str, object]) -> dict[str, object]:
        if task["choice"] != "diloco":
            raise loops.RowFailed("measuring", "failed")
        return {"turns": {sync_cost.LOCAL: [{"seconds": 0.1}], "fp32": [turn]}, "values": 5, "device": "cpu"}

    shown: list[tuple[str, ...]] = []
    monkeypatch.setattr(sync_cost, "ask", ask)
    monkeypatch.setattr(sync_cost, "show", lambda title, columns, rows, words: shown.extend(rows))
    monkeypatch.setattr(sys, "argv", ["sync_cost.py", "--methods", "diloco", "co2", "--wires", "fp32"])
    sync_cost.main()
    assert [row[:4] for row in shown] == [("diloco", "fp32", "1", "100.0"), ("co2", "fp32", "8", "failed")]
    monkeypatch.setattr(sys, "argv", ["sync_cost.py", "--methods", "co2"])
    with pytest.raises(SystemExit, match="no method could be measured"):
        sync_cost.main()


def test_loops_that_could_not_be_profiled_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ask(script: str, ranks: int, task: dict[str, object]) -> dict[str, float]:
        if task["engine"] != "fsdp2":
            raise loops.RowFailed("measuring", "failed with exit code 1")
        parts = step_parts.parts_of([("aten::mm", 0.5)], wall=1.0)
        return {**parts, step_parts.WALL: 1.0, step_parts.IDEAL: 0.4}

    monkeypatch.setattr(step_parts, "ask", ask)
    monkeypatch.setattr(step_parts, "RESULTS", tmp_path)
    engines = [throughput.BARE, "fsdp2", throughput.PLAIN]
    words = ["--size", "6M", "--engines", *engines, "--checkpoint", "yes", "--write"]
    monkeypatch.setattr(sys, "argv", ["step_parts.py", *words])
    step_parts.main()
    sentence = "Not measured: bare loop (failed with exit code 1); plain loop (not possible with these settings)."
    assert sentence in capsys.readouterr().out
    assert sentence in (tmp_path / "step_parts" / "README.md").read_text()


def test_a_throughputs_row() -> None:
    found = {"tokens": 1000, "seconds": [0.5, 0.4, 0.6], "first": 9.0, "flops": 1e6, "peak_flops": 1e10, "ranks": 2}
    found |= {"peak": 100e6, "predicted": 110e6, "predicted_seconds": 0.4, "grown": None}
    row = throughput.row(row_of("fsdp2"), found, {"seconds": [0.45]})
    rates = ("2,000", "1,667 to 2,500", "0.900", "2,500", "10.0 %", "9.0")
    assert row == ("6M", "fsdp2", "checkpoint", *rates, "100", "110", "+10.0 %", "")
    bare = throughput.row(row_of(throughput.BARE), {**found, "peak_flops": None, "grown": 5e6}, None)
    assert bare[5:] == ("", "", "", "9.0", "100", "", "", "5")
    uncounted = throughput.row(row_of("fsdp2"), {**found, "peak": None}, None)
    selective = throughput.row(row_of("fsdp2", compile=True, checkpoint="selective"), found, None)
    assert selective[2] == "compile+selective"
    assert uncounted[-4:] == ("", "110", "", "")
    assert len(row) == len(bare) == len(throughput.COLUMNS)


def test_texts_rows() -> None:
    library = [{"seconds": 2.0, "cpu": 4.0, "thread": 1.0, "tokens": 6_000_000}]
    found = {data.PLAIN: library, data.READ: [{"seconds": 0.5, "cpu": 0.5, "thread": 0.5, "tokens": 0}]}
    rows = data.rows_of(found, text_bytes=20_000_000)
    assert rows[0] == (data.PLAIN, "2.00", "2.00 to 2.00", "10.0", "3.00", "1.00", "4.00", "1.00")
    assert rows[1] == (data.READ, "0.50", "0.50 to 0.50", "40.0", "", "", "0.50", "0.50")
    row = data.loader_row(
        "packed", (8, 128), {"batches": [1e-4, 2e-4, 3e-4], "tokens": [1024] * 3, "steps": [(0.5, 0.001)] * 3}
    )
    assert row == ("packed", "8 x 128", "200", "100 to 300", "5.1", "500", "0.200 %")
    assert len(rows[0]) == len(data.COLUMNS) and len(row) == len(data.LOADER_COLUMNS)
    assert list(map(len, data.batched(["x" * 750_000] * 5))) == [2, 2, 1]


def test_starts_after_a_kill_have_a_line_of_their_own() -> None:
    """The second start follows Ctrl-C. The third one follows a kill, after which some steps are repeated."""
    first, killed = stream.first_steps([3.0, 4.0, 9.0, 2.0], ["Ctrl-C", stream.KILLED, "Ctrl-C", stream.KILLED])
    assert first == ("first step after", "3.0 s (median), 4.0 s (longest) of 3 starts")
    assert killed[0].startswith("first new step after a SIGKILL of the run")
    assert killed[1] == "9.0 s (median), 9.0 s (longest) of 1 starts"
    assert len(stream.first_steps([3.0], [stream.KILLED])) == 1


def test_a_stragglers_row() -> None:
    def speeds(fast: float, slow: float, between: float) -> list[list[float]]:
        """Return speeds of two fast replicas and of one that is half as fast: steps in 10 s, in all and between averages."""
        one = [fast, 10.0, fast, between, 10.0, between, 0.25]
        return [one, one, [slow, 10.0, 2 * slow, slow, 10.0, 2 * slow, 0.75]]

    alone = [0.1, 0.1, 0.1]  # seconds per step: 100 steps in 10 s, of a replica that is half as fast 50
    nobody, one = {"factor": 1.0, "slow": None}, {"factor": 2.0, "slow": 2}
    results = [
        {"scenario": nobody, "method": "wagma_10", "alone": alone, "rows": [[90, 10, 90, 90, 10, 90, 0]] * 3},
        {"scenario": one, "method": "wagma_10", "alone": alone, "rows": speeds(60, 40, 81)},
        {"scenario": one, "method": "edit", "alone": alone, "rows": speeds(60, 40, 81)},
    ]
    results.insert(0, results[0] | {"method": "edit"})
    rows = {(row[0], row[1]): row[2:] for row in stragglers.rows_of(results)}
    assert rows["none", "edit"] == ("9.0", "", "90.0 %", "90.0 to 90.0", "", "", "", "")
    # (2 x 6 + 4) steps/s over (2 x 10 + 5)
    start = ("6.0", "4.0", "64.0 %", "64.0 to 64.0")
    assert rows["one, 2x", "edit"] == (*start, "", "", "", "")
    assert rows["one, 2x", "wagma_10"] == (*start, "81.0 %", "81.0 to 81.0", "90.0 %", "42 %")
    assert all(len(row) + 2 == len(stragglers.COLUMNS) for row in rows.values())


def test_rows_of_rounding_compare_with_a_copy_turn_by_turn() -> None:
    seconds = {"copy": [0.005, 0.020, 0.010], "plain encode": [0.010, 0.020, 0.030], "plain decode": [0.004] * 3}
    seconds |= {"compiled encode": [0.005, 0.010, 0.030], "compiled decode": [0.001] * 3}
    plain, compiled = rounding.rows_of("int4", seconds, 12.34)
    assert plain == ("int4", "plain", "20.00", "10.00 to 30.00", "2.00", "4.00", "4.00 to 4.00", "0.40", "")
    assert compiled == ("int4", "compiled", "10.00", "5.00 to 30.00", "1.00", "1.00", "1.00 to 1.00", "0.10", "12.3")
    assert len(plain) == len(compiled) == len(rounding.COLUMNS)


def test_the_copy_of_the_rounding_page_is_that_of_all_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, titles = iter((0.001, 0.002, 0.003, 0.004, 0.005)), []

    def measure(task: dict[str, object]) -> dict[str, object]:
        seconds = [next(copies)]
        works = ("copy", "plain encode", "plain decode", "compiled encode", "compiled decode")
        return {"seconds": dict.fromkeys(works, seconds), "compiling": 1.0}

    monkeypatch.setattr(rounding, "measure", measure)
    monkeypatch.setattr(rounding, "show", lambda title, columns, rows, words: titles.append(title))
    monkeypatch.setattr(sys, "argv", ["rounding.py"])
    rounding.main()
    assert titles[0].endswith("A copy takes 3.00 ms (1.50 to 4.50)")


@pytest.mark.parametrize(
    "name", ["aten::scaled_dot_product_attention", "aten::_flash_attention_backward", "aten::_cudnn_attention_forward"]
)
def test_kernels_of_attention_are_attention(name: str) -> None:
    assert step_parts.group_of(name) == "attention"
    assert step_parts.group_of(f"triton_poi_fused_{name}_add_3") == "compiled"


def test_rows_of_a_steps_parts_end_with_the_whole_and_the_ideal() -> None:
    loop = {
        **step_parts.parts_of([("aten::mm", 0.5), ("aten::copy_", 0.25)], wall=1.0),
        "a step": 1.0,
        step_parts.IDEAL: 0.4,
    }
    rows = step_parts.rows_of({"fsdp2": loop, "zero3": loop})
    assert rows[:2] == [("matrix products", *2 * ["500.0 (50 %)"]), ("copies", *2 * ["250.0 (25 %)"])]
    assert [name for name, *_ in rows[-4:-1]] == [step_parts.IDLE, step_parts.WALL, step_parts.IDEAL]
    assert rows[-2][1] == "400.0 (40 %)" and rows[-1] == (step_parts.OVER, "2.00", "2.00")
    assert len(rows) == len(step_parts.GROUPS) + 5
