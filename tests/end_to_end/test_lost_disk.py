"""Tests of runs whose disk is lost or read-only, from the command line."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Runs, exact_lines, summary
from tests.mounts import read_only

TWO = ("parallel.replicas=2", "parallel.shards=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("disks"))
    made.reference(2, 1)  # the run that these tests compare with
    return made


def test_a_run_whose_disk_is_lost_continues_from_its_mirror_to_the_same_losses(runs: Runs) -> None:
    mirror = f"file://{runs.folder}/elsewhere"
    command = (*TWO, f"checkpoint.mirror={mirror}", "checkpoint.keep=2")
    process = runs.start_held("lost", 4, *command)
    process.send_signal(signal.SIGTERM)
    code, output = runs.end(process)
    assert code == 3, output
    stopped = summary(runs.path("lost"))
    assert stopped["mirrored"] == stopped["steps"], output
    shutil.rmtree(runs.path("lost"))

    code, output = runs.run("lost", *command)
    assert code == 0, output
    fetched = f"{mirror}/lost/checkpoints/step-{stopped['steps']:08d}"
    assert f"fetched {fetched}\n" in output
    assert f"continuing from {runs.path('lost')}/checkpoints/step-{stopped['steps']:08d}\n" in output
    assert runs.exact("lost") == exact_lines(runs.reference(2, 1))
    assert summary(runs.path("lost"))["mirrored"] == 12
    there = runs.folder / "elsewhere/lost"
    assert (there / "checkpoints/step-00000012/state.json").is_file()
    assert len(os.listdir(there / "checkpoints")) == 2
    assert (there / "metrics.jsonl").read_text() == (runs.path("lost") / "metrics.jsonl").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_run_directory_is_one_line_and_loses_nothing(runs: Runs) -> None:
    reference, fixed = runs.reference(2, 1), runs.path("fixed")
    shutil.copytree(reference, fixed)
    (fixed / "summary.json").unlink()  # as if the run had been killed at its end
    recipe = fixed / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"name: {reference.name}", "name: fixed"))
    before = files_in(fixed)
    with read_only(fixed):
        code, output = runs.run("fixed", *TWO)
    assert code == 2 and "Traceback" not in output, output
    [refusal] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert refusal == (
        f"error: run.out_dir: {fixed} can't be written (Read-only file system); make room, or choose another folder"
    )
    assert files_in(fixed) == before


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
