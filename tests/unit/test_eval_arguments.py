"""Tests of the arguments of `eval`, `export` and `generate`: mistakes are reported before anything large is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from llmtrain.config import SuiteSection
from llmtrain.errors import CheckpointError, ModelError, UserError
from llmtrain.eval import command
from llmtrain.eval.arguments import check_arguments
from llmtrain.eval.evaluated_checkpoint import Checkpoint, check_model_path, has_step
from llmtrain.eval.texts import check_device, generate
from llmtrain.eval.units import EvalUnit
from llmtrain.suites import check_suite
from tests.end_to_end.runs import environment
from tests.unit.test_eval_units import write_model

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")
PROGRAM = """
import json, sys
from llmtrain.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as left:
        print(left.code, file=sys.stderr)
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with empty checkpoints of steps 10 and 20, and an export of step 5, which has no checkpoint."""
    run = tmp_path / "run"
    for step in (10, 20):
        (run / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (run / f"checkpoints/step-{step:08d}/state.json").write_text("{}")
    (run / "recipe.yaml").write_text("")
    write_model(run / "export/step-00000005")
    (run / "export/step-00000005/export.json").write_text("{}")
    return run


def test_a_mistyped_argument_is_reported_before_anything_large_is_imported(run: Path) -> None:
    of_run = ["eval", str(run), "--suite", "small"]
    expected = {
        ("eval", "runs/quikstart"): "runs/quikstart: there is no such folder; give a run (runs/NAME) or a folder that ",
        ("eval", str(run), "--suite", "smal"): "--suite smal: there is no such suite; did you mean small?",
        (
            *of_run,
            "--device",
            "cud",
        ): "--device cud: there is no such device; give cpu, cuda, or one GPU such as cuda:1",
        (*of_run, "--step", "7"): f"{run} has no checkpoint of step 7; there are: 10, 20",
        (*of_run, "--baseline", "runs/b"): "runs/b: there is no such folder; give a run (runs/NAME) or a folder that ",
        (
            *of_run,
            "--out",
            f"{run}/recipe.yaml/a",
        ): f"{run}/recipe.yaml/a: {run}/recipe.yaml is a file; choose another folder with --out",
        (*of_run, "--step", "10", "--over-time"): "--over-time is for all checkpoints and --step for one; leave one of",
        (
            "eval",
            str(run),
            "--suite",
            "tinystories",
        ): "text tinystories_valid reads tinystories/valid.txt: give the fol",
        ("export", "runs/quikstart"): "runs/quikstart does not exist; give one that training made, such as runs/quick",
        ("export", str(run), "--step", "7"): f"{run} has no checkpoint of step 7; there are: 10, 20",
        ("export", str(run), "--weights", "best"): "--weights is 'best'; expected mean, anchor, or replica:K such as",
        (
            "export",
            str(run),
            "--max-shard-size",
            "many",
        ): "--max-shard-size is 'many'; expected a size such as 500MB or",
        ("generate", "runs/quikstart"): "runs/quikstart: there is no such folder; give a run (runs/NAME) or a folder",
        ("generate", f"{run}/checkpoints"): f"{run}/checkpoints has no config.json, so it is not a folder with a model",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps([list(words) for words in expected]), *HEAVY]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert json.loads(process.stdout) == [], process.stderr
    lines = process.stderr.splitlines()
    assert lines[1::2] == ["2"] * len(expected), process.stderr
    for line, message in zip(lines[::2], expected.values(), strict=True):
        assert line.startswith(f"error: {message}")


def test_what_is_there_passes(run: Path, tmp_path: Path) -> None:
    check_arguments(
        [run], "small", step=5, device="cuda:1", baseline=run / "export/step-00000005", out=tmp_path / "a/b"
    )
    check_model_path(run / "export/step-00000005", 5)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7"):
        check_arguments([run], "small", step=7)


def test_results_have_a_folder_that_can_be_written_and_is_of_no_other_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before hours of work: for a colleague's model without --out, and for models of the same name with it."""
    here, there = (write_model(tmp_path / name / "model") for name in "ab")
    (tmp_path / "out/model").mkdir(parents=True)
    result = tmp_path / "out/model/small.json"
    result.write_text(json.dumps({"model": str(here)}))
    check_arguments([here], "small", out=tmp_path / "out")
    with pytest.raises(UserError, match=r"out/model has results of \S+a/model; choose another folder with --out for"):
        check_arguments([there], "small", out=tmp_path / "out")
    result.write_text(json.dumps({"model": str(tmp_path / "moved")}))
    check_arguments([there], "small", out=tmp_path / "out", baseline=run)
    monkeypatch.setattr("os.access", lambda path, mode: path != here)
    message = r"a/model/eval\S*: \S+a/model can't be written; choose another folder with --out"
    with pytest.raises(UserError, match=message):
        check_arguments([here], "small")
    check_arguments([run], "small", baseline=here)  # a baseline may be in the cache already
    with pytest.raises(UserError, match=message):
        unit = EvalUnit("quiz", {}, (), pytest.fail)
        command._evaluate_one(Checkpoint("a", here, here), [unit], None, "small", None, Console())


def test_a_baseline_is_of_the_same_step_if_it_has_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_run(path: Path, label: str, step: int | None, over_time: bool) -> list[Checkpoint]:
        return [Checkpoint(label, path, path, 20 if step is None else step)]

    monkeypatch.setattr(command, "find_checkpoints", of_run)
    console = Console()
    for step, expected in ((None, 20), (10, 10), (5, 5), (20, 20)):
        assert command._find_baseline(run, "b", step, console).step == expected
        assert capsys.readouterr().out == ""
    for step in (7, "best"):
        assert command._find_baseline(run, "b", step, console).step == 20
        assert capsys.readouterr().out == f"--step {step}: b has none, so the baseline is its step 20\n"
    assert not has_step(write_model(tmp_path / "model"), 10)


def test_a_recipe_has_a_device_that_some_machine_has() -> None:
    check_suite(SuiteSection(name="small", device="cuda:1"))
    with pytest.raises(
        UserError, match=r"eval\.suite\.device gpu: there is no such device; give cpu, cuda, or one GPU"
    ):
        check_suite(SuiteSection(name="small", device="gpu"))


def test_one_model_has_no_steps_to_generate_from(run: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with pytest.raises(UserError, match=r"--step 5: \S+ is one model, not a run with checkpoints; leave --step out"):
        generate(folder, "Once", step=5)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"model can't be loaded by transformers \(.*\); export the model again"):
        generate(folder, "Once")


def test_a_device_that_this_machine_lacks_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise lm-evaluation-harness takes the CPU or the first GPU without a message."""
    found = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    monkeypatch.setattr(torch, "accelerator", found)
    for device in (None, "cpu", "cuda", "cuda:1"):
        check_device(device)
    for device in ("cuda:2", "mps"):
        with pytest.raises(
            UserError, match=f"--device {device}: torch finds . such devices on this machine; give cpu or"
        ):
            check_device(device)
    found.is_available = lambda: False
    with pytest.raises(UserError, match="--device cuda: torch finds 0 such devices"):
        check_device("cuda")
