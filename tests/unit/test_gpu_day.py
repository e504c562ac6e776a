"""The kit for a day with a GPU: no row loses another, and all rows are possible."""

from __future__ import annotations

import importlib
import json
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

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
gpu_day, gpu_pack, gpu_rows, gpu_run = map(importlib.import_module, ("gpu_day", "gpu_pack", "gpu_rows", "gpu_run"))
loops, sync_cost, table, throughput = map(importlib.import_module, ("loops", "sync_cost", "table", "throughput"))

SPEED = {"tokens": 1000, "seconds": [0.5], "first": 9.0, "flops": 1e6, "peak_flops": None, "ranks": 1, "peak": None}
SPEED |= {"predicted": 1e6, "predicted_seconds": 0.4, "grown": None}


def fake_ask(script: str, ranks: int, task: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Answer as a process would, but fail for a bare loop."""
    if task.get("engine") == throughput.BARE:
        raise loops.RowFailed("measuring", "failed")
    return SPEED


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    monkeypatch.setattr(module, "ask", fake_ask)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the day believe that there is a GPU."""
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


def test_rows_can_be_chosen_by_parts_of_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, gpu_day, "throughput", "--out", str(tmp_path), "--only", "160M", "1B-2048")
    assert [row["row"].partition(" ")[0] for row in rows_of(tmp_path)[1:]] == ["160M", "1B-2048", "1B-2048"]


def test_no_row_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, gpu_day, "parts,loss", "--out", str(tmp_path), "--deadline", "1")
    assert [row for row in rows_of(tmp_path) if "skipped" not in row] == []


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


@pytest.mark.parametrize("rehearse", [False, pytest.param(True, marks=pytest.mark.deep)])
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
