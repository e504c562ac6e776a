"""Tests of the kit for a day with a GPU: a failed row costs no other row, all rows are valid, and documented calls fit."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from tests.distributed.pool import RankPool

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
gpu_day, gpu_pack, gpu_rows, gpu_run = map(importlib.import_module, ("gpu_day", "gpu_pack", "gpu_rows", "gpu_run"))
loops, sync_cost, table, throughput = map(importlib.import_module, ("loops", "sync_cost", "table", "throughput"))

SPEED = {"tokens": 1000, "seconds": [0.5], "first": 9.0, "flops": 1e6, "peak_flops": None, "ranks": 1, "peak": None}
SPEED |= {"predicted": 1e6, "predicted_seconds": 0.4, "grown": None}


def fake_ask(script: str, ranks: int, task: dict[str, Any], *others: Any) -> dict[str, Any]:
    """Answer as a row's process would. For a bare loop, write output that is cut off within a character, and fail."""
    if task.get("engine") == throughput.BARE:
        if len(others) == 3:
            others[2].buffer.write(b"\xe2\x80")
        raise loops.RowFailed("measuring", "failed")
    return SPEED


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    monkeypatch.setattr(module, "ask", fake_ask)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU."""
    monkeypatch.setattr(gpu_day, "on_gpu", lambda: True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "rows.jsonl").read_text().splitlines()))


def test_a_row_that_fails_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, gpu_day, "throughput", "--out", str(tmp_path))
    machine, *rows = rows_of(tmp_path)
    assert machine["phase"] == "provenance" and machine["found"] == SPEED
    assert len(rows) == 21 and [row["row"] for row in rows if "failed" in row] == [
        "1B bare loop compile",
        "1B bare loop",
        "7B-layers bare loop compile",
    ]
    assert all(row["found"] == SPEED for row in rows if "failed" not in row)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 22 and "FAILED" in shown[3] and "2,000 tokens/s" in shown[2]


def test_no_row_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, gpu_day, "parts,loss", "--out", str(tmp_path), "--deadline", "1")
    rows = rows_of(tmp_path)
    assert len(rows) == 7 and all("skipped" in row for row in rows)


def test_a_result_that_does_not_read_as_expected_is_kept_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, gpu_day, "checkpoint", "--out", str(tmp_path))
    assert all("'stood_still'" in row["failed"] and row["found"] == SPEED for row in rows_of(tmp_path)[1:])


def test_without_a_gpu_nothing_is_measured_but_in_a_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_day, "on_gpu", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is found; with --rehearse"):
        run(monkeypatch, gpu_day, "parts", "--out", str(tmp_path))


def test_an_unknown_phase_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"partz: no such phase; choose of preflight, throughput"):
        run(monkeypatch, gpu_day, "partz", "--out", str(tmp_path))


def test_a_table_of_throughput_is_printed_in_spite_of_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--engines", throughput.BARE, "fsdp2", "--sizes", "6M", "--compile", "no", "--checkpoint", "no")
    run(monkeypatch, throughput, *chosen)
    shown = " ".join(capsys.readouterr().out.split())
    assert "measuring" in shown and "2,000" in shown


@pytest.mark.deep
@pytest.mark.parametrize("rehearse", [False, True])
def test_all_rows_are_possible(monkeypatch: pytest.MonkeyPatch, rehearse: bool) -> None:
    for text in (ROOT / "missing", ROOT):
        monkeypatch.setattr(gpu_rows, "SAMPLE", text)
        day = gpu_rows.Day(rehearse, gpu=not rehearse)
        for phase, rows in gpu_rows.PHASES.items():
            names = [row.name for row in rows(day)]
            assert len(set(names)) == len(names) > 1
            for row in rows(day):
                assert (ROOT / "benchmarks" / row.script).exists() and json.dumps(row.task)
                for recipe in recipes_of(phase, dict(row.task)):
                    check(recipe, None)


def recipes_of(phase: str, task: dict[str, Any]) -> list[Any]:
    if phase in ("throughput", "parts"):
        assert throughput.is_possible(task), task
        return [throughput.recipe_of(task, throughput.SIZES[task["size"]])]
    if phase == "sync":
        return [sync_cost.recipe_of(task, keys) for keys in sync_cost.loops_of(task).values()]
    if phase == "run":
        return [load_recipe(ROOT / loops.RECIPE, gpu_run.overrides_of(task, "runs"))]
    return []


def test_a_commit_is_known_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(table.COMMIT, raising=False)
    monkeypatch.setenv("PATH", "")
    assert table.commit() == "unknown"
    monkeypatch.setenv(table.COMMIT, "abc1234")
    assert table.commit() == "abc1234" and "commit abc1234," in table.provenance()


def test_a_row_ends_with_all_that_it_has_started() -> None:
    process = subprocess.Popen(["bash", "-c", "sleep 100 & wait"])
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    loops.end_with_children(process)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert process.returncode and not alive


def test_a_kit_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "text", tmp_path / "gpt2"
    tokenizer.mkdir()
    for file in (text, tokenizer / "tokenizer.json"):
        file.write_text("x" * 2**20)
    monkeypatch.setattr(gpu_pack, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_pack, "fetch", lambda python, machine, wheels, unpacked: wheels.mkdir(exist_ok=True))
    monkeypatch.setattr(gpu_pack, "tree", lambda: [text])
    given = ["--text", str(text), "--validation", str(text), "--tokenizer", str(tokenizer)]
    monkeypatch.setattr(sys, "argv", ["gpu_pack.py", *given])
    gpu_pack.main()
    assert (tmp_path / ".gpu/commit").read_text() == gpu_pack.commit()
    assert {path.name for path in (tmp_path / ".gpu").rglob("*.*")} == {"train.txt", "valid.txt", "tokenizer.json"}
    monkeypatch.setattr(sys, "argv", ["gpu_pack.py", *given, "--limit", "3"])
    with pytest.raises(SystemExit, match=r"together 4\.0 MiB, but --limit is 3; give less text"):
        gpu_pack.main()


def test_how_results_read() -> None:
    rate = {**SPEED, "peak_flops": 1e10, "peak": 2e9, "predicted": 3e9}
    day = gpu_rows.Day(False, True)
    lines = {phase: rows(day)[0].line for phase, rows in gpu_rows.PHASES.items()}
    assert lines["throughput"](rate) == (
        "2,000 tokens/s (2,000 to 2,000), MFU 20.0 %, peak 2.0 GB, predicted 3.0 (+50.0 %), first step 9.0 s"
    )
    warm = gpu_rows.PHASES["throughput"](day)[-1].line
    assert warm({**rate, "predicted": None}) == "2,000 tokens/s (2,000 to 2,000), MFU 20.0 %, peak 2.0 GB"
    turns = {"local": [{"seconds": 1.0}] * 3, "fp32": [{"seconds": 1.25}] * 3}
    assert lines["sync"]({"turns": turns, "values": 1000}) == (
        "fp32 adds 250.0 ms a round; a local step 1000.0 ms, 1,000 values"
    )
    ended = SimpleNamespace(exit_codes=[3, 0], stopped_at=20, continued=["continuing"], rounds=0, mfu=None)
    ran = {**vars(ended), "losses": [(10, 9.0), (40, 5.0)], "tokens_per_second": 1234.0}
    assert lines["run"](ran) == "exit codes [3, 0], stopped at 20, 1 x continued, loss 9.00 to 5.00, 1,234 tokens/s"


# ---- the documented calls

GPU_DAY = ROOT / "benchmarks" / "GPU_DAY.md"
LONGEST_COMMAND = 2000
CALLS = {"First call": 560.0, "Second call": 220.0}
"""Seconds from the start of each call to its end. Two of the fifteen minutes are for the start of the machine."""
INSTALLING = 5.0


def commands_of(heading: str) -> list[str]:
    """Return the commands under a heading of GPU_DAY.md."""
    _, _, rest = GPU_DAY.read_text().partition(f"\n### {heading}\n")
    section = re.split(r"\n#+ ", rest)[0]
    return [line.removeprefix("    ") for line in section.splitlines() if line.startswith("    ")]


def selected(command: str, used: float) -> tuple[list[tuple[str, Any]], float]:
    """Return the rows that a command of gpu_day.py selects, including the machine's, and the time at which the command ends, in
    seconds since the start of the call. The command begins `used` seconds after that start."""
    at, end = re.search(r"\$\(\((\d+)-SECONDS\)\)", command), None
    if at:
        end, command = float(at[1]), command.replace(at[0], str(int(at[1]) - used))
    script, *given = shlex.split(command)[1:]
    assert script == "benchmarks/gpu_day.py"
    options = gpu_day.arguments().parse_args(given)
    day = gpu_rows.Day(options.rehearse, gpu=True)
    first = [] if options.no_machine else [("provenance", gpu_rows.machine(day))]
    return [*first, *gpu_day.chosen(options.phases, day, options.only)], end or used + options.deadline


def names_of(rows: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(phase, row.name) for phase, row in rows]


def seconds_of(rows: list[tuple[str, Any]]) -> float:
    return sum(row.expected for _, row in rows)


class DayTests:
    """Documented command that runs tests."""

    def __init__(self, command: str):
        self.words = shlex.split(command.partition(" 2>&1 | tee $OUT/")[0])
        self.seconds = float(self.words[5]) + float(self.words[4])
        """Seconds after which the command is killed."""
        self.files = [word for word in self.words if word.startswith("tests/")]

    def value(self, option: str) -> str:
        return self.words[self.words.index(option) + 1]


def test_the_first_call_begins_with_real_runs_and_reaches_7b() -> None:
    runs, tests, speed = commands_of("First call")
    rows, end = selected(runs, INSTALLING)
    assert names_of(rows) == [
        ("provenance", "machine"),
        ("preflight", "attention"),
        ("preflight", "tokens"),
        ("run", "160M, stopped and continued"),
        ("run", "160M, EDiT, four replicas in one process"),
    ]
    assert seconds_of(rows) <= end - INSTALLING
    rows, last = selected(speed, began := end + DayTests(tests).seconds)
    four = rows[:4]
    assert [name for _, name in names_of(four)] == [
        "1B llmtrain compile",
        "1B torchtitan's model compile",
        "1B bare loop compile",
        "7B-layers llmtrain compile",
    ]
    assert seconds_of(four) <= last - began and last == CALLS["First call"]


def test_the_second_call_measures_one_row_of_each_phase() -> None:
    tests, parts = commands_of("Second call")
    rows, end = selected(parts, began := INSTALLING + DayTests(tests).seconds)
    assert names_of(rows) == [
        ("parts", "1B llmtrain"),
        ("sync", "1B edit, offloaded"),
        ("rounding", "int8"),
        ("loss", "1B, chunks of 1024"),
    ]
    assert seconds_of(rows) <= end - began and end == CALLS["Second call"]


def test_both_calls_and_the_start_of_the_machine_take_a_quarter_of_an_hour() -> None:
    assert sum(CALLS.values()) + 120 <= 15 * 60


@pytest.mark.parametrize("heading", [*CALLS, "With more time"])
def test_documented_tests_name_what_failed_whenever_they_end(heading: str, pytestconfig: pytest.Config) -> None:
    """At the end of its time, pytest is interrupted and not terminated, so that it prints its summary. The command has to outweigh the
    quiet options of pyproject.toml. A pool of ranks gives up before the test's timeout, because its message says more."""
    [tests] = [DayTests(command) for command in commands_of(heading) if "pytest" in command]
    assert tests.words[:5] == ["timeout", "-s", "INT", "-k", "10"]
    given = [*pytestconfig.getini("addopts"), *tests.words]
    letters = "".join(word[1:] for word in given if re.fullmatch("-[vq]+", word))
    assert letters.count("v") > letters.count("q")
    assert "--gpu" in tests.words and "-ra" in tests.words and "--tb=short" in tests.words
    assert float(tests.value("--timeout")) > inspect.signature(RankPool.run).parameters["timeout"].default
    for name in tests.files:
        assert (ROOT / name).exists()


def test_documented_calls_are_short_and_are_shell() -> None:
    prefix = commands_of("Prefix")
    for heading in CALLS:
        call = "\n".join([*prefix, *commands_of(heading)])
        assert len(call) <= LONGEST_COMMAND
        subprocess.run(["bash", "-n"], input=call, text=True, check=True)


def test_all_phases_are_in_the_plan() -> None:
    rows = [row for heading in (*CALLS, "With more time") for row in commands_of(heading) if "gpu_day.py" in row]
    assert {phase for command in rows for phase, _ in selected(command, 0)[0]} == {"provenance", *gpu_rows.PHASES}


def test_a_name_selects_its_row_alone_and_a_part_of_names_all_of_them() -> None:
    day = gpu_rows.Day(False, gpu=True)
    for only, found in (
        (["1B edit"], ["1B edit"]),
        (["blocking"], ["1B edit, blocking", "1B edit, blocking, offloaded"]),
        (["1B edit", "1B diloco, offloaded"], ["1B edit", "1B diloco, offloaded"]),
    ):
        assert names_of(gpu_day.chosen(["sync"], day, only)) == [("sync", name) for name in found]
    with pytest.raises(SystemExit, match=r"--only int8, 1b: no row of sync, loss has that in its name"):
        gpu_day.chosen(["sync", "loss"], day, ["1B edit", "int8", "1b"])


def test_rows_leave_time_for_what_is_slower_than_expected() -> None:
    for rehearse in (False, True):
        day = gpu_rows.Day(rehearse, gpu=True)
        for row in [gpu_rows.machine(day), *(row for rows in gpu_rows.PHASES.values() for row in rows(day))]:
            assert row.limit >= 2 * row.expected


def test_rows_of_an_engine_find_its_kernels_but_the_first_one_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    day = gpu_rows.Day(False, gpu=True)
    kernels = gpu_rows.kernels_of(gpu_rows.ONE_DEVICE)
    assert all(re.fullmatch(r"[\w-]+", gpu_rows.kernels_of(engine).name) for engine in throughput.ENGINES)
    speed, parts, runs = gpu_rows.throughput(day), gpu_rows.parts(day), gpu_rows.run(day)
    ours = [row for row in (*speed, *parts, *runs) if row.environment["TORCHINDUCTOR_CACHE_DIR"] == str(kernels)]
    assert {row.name for row in (speed[0], parts[0], *runs)} <= {row.name for row in ours}
    assert [row.name for row in ours if row.empties is not None] == [speed[0].name] and speed[0].empties == kernels
    kernels.mkdir(parents=True)
    run(monkeypatch, gpu_day, "parts", "--out", str(tmp_path), "--only", parts[0].name, "--no-machine")
    assert kernels.exists() and [row["row"] for row in rows_of(tmp_path)] == [parts[0].name]
    run(monkeypatch, gpu_day, "throughput", "--out", str(tmp_path), "--only", speed[0].name, "--no-machine")
    assert not kernels.exists()


def test_a_row_starts_if_half_of_its_time_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_day, "ask", fake_ask)
    journal, row = gpu_day.Journal(tmp_path), gpu_rows.throughput(gpu_rows.Day(False, gpu=True))[0]
    for left in (0.4, 0.6):
        gpu_day.measure_row(row, "throughput", time.monotonic() + left * row.expected, journal, 1.0)
    assert ["skipped" in found for found in rows_of(tmp_path)] == [True, False]
