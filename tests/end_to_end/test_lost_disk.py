"""Runs whose disk is lost, damaged or read-only, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Runs, exact
from tests.mounts import read_only

TWO = ("parallel.shard=1", "eval.sample_prompt=null", "log.tensorboard=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("disks"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[dict]:
    """What a run measures that nothing happens to."""
    code, output = runs.run("whole", *TWO)
    assert code == 0, output
    return [exact(line) for line in runs.lines("whole")]


def test_a_run_whose_disk_is_lost_continues_from_its_mirror_to_the_same_losses(runs: Runs, whole: list[dict]) -> None:
    mirror = f"file://{runs.folder}/elsewhere"
    command = (*TWO, f"checkpoint.mirror={mirror}", "checkpoint.keep=2")
    process = runs.start(runs.command("lost", *command))
    runs.wait_for("lost", 12)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    stopped = json.loads((runs.path("lost") / "summary.json").read_text())
    assert stopped["mirrored"] == stopped["steps"], output
    shutil.rmtree(runs.path("lost"))

    code, output = runs.run("lost", *command)
    assert code == 0, output
    fetched = f"{mirror}/lost/checkpoints/step-{stopped['steps']:08d}"
    assert f"fetched {fetched}\n" in output
    assert f"continuing from {runs.path('lost')}/checkpoints/step-{stopped['steps']:08d}\n" in output
    assert [exact(line) for line in runs.lines("lost")] == whole
    assert json.loads((runs.path("lost") / "summary.json").read_text())["mirrored"] == 24
    there = runs.folder / "elsewhere/lost"
    assert (there / "checkpoints/step-00000024/state.json").is_file()
    assert len(os.listdir(there / "checkpoints")) == 2
    assert (there / "metrics.jsonl").read_text() == (runs.path("lost") / "metrics.jsonl").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_run_directory_is_one_line_and_loses_nothing(runs: Runs, whole: list[dict]) -> None:
    shutil.copytree(runs.path("whole"), runs.path("fixed"))
    (runs.path("fixed") / "summary.json").unlink()  # as if it had been killed at its end
    recipe = runs.path("fixed") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: whole", "name: fixed"))
    before = files_in(runs.path("fixed"))
    with read_only(runs.path("fixed")):
        code, output = runs.run("fixed", *TWO)
    assert code == 2 and "Traceback" not in output, output
    [refusal] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert refusal == (
        f"error: run.out_dir: {runs.path('fixed')} can't be written (Read-only file system); make room, or choose another folder"
    )
    assert files_in(runs.path("fixed")) == before


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
