"""Tests of the script that rewrites the committed reports of comparisons."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from llmtrain.compare.comparison import COMPARISON
from tests import ROOT
from tests.unit.written_trials import straight, write_trial

sys.path.append(str(ROOT / "benchmarks"))
compare_reports = importlib.import_module("compare_reports")

OLD = """# Comparison mine

**Said before.**

## Timelines

![a picture that stays](plots/timeline-plain.png)

## How this report was made

- Command: `llmtrain compare mine.yaml`
- Commit: 0123abc
"""
FILE = """name: mine
recipe: a.yaml
hosts: {count: 4}
runs: {synchronous: {}, edit: {}}
conditions: {plain: {}}
seeds: [1, 2]
baseline: edit
target: {loss: 4.0}
"""


def test_a_rewritten_report_keeps_the_timelines_and_the_command_of_its_trials(tmp_path: Path) -> None:
    folder, trials = tmp_path / "stored", tmp_path / "trials"
    (folder / "plots").mkdir(parents=True)
    (folder / "report.md").write_text(OLD)
    (folder / COMPARISON).write_text(FILE)
    for seed in (1, 2):
        write_trial(trials, "plain", "synchronous", seed, straight(100.0, 4.0), commit="4567def")
        write_trial(trials, "plain", "edit", seed, straight(20.0, 4.0), commit="4567def")
    compare_reports.rewrite(folder, trials, folder / COMPARISON)
    text = (folder / "report.md").read_text()
    assert text.startswith("# Comparison mine\n\n**No run was significantly faster than the baseline edit.**\n")
    assert "| synchronous | 2 done | slower |" in text and "- Commit: 4567def\n" in text
    assert text.count("![a picture that stays]") == text.count("- Command: `llmtrain compare mine.yaml`\n") == 1
    assert {path.suffix for path in (folder / "plots").iterdir()} == {".png"}
    compare_reports.rewrite(folder, trials, folder / COMPARISON, target=6.0)
    text = (folder / "report.md").read_text()
    assert "time to loss 6.000" in text and text.count("## Timelines\n") == 1
    assert str(tmp_path) not in text
