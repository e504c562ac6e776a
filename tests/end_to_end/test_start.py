"""Tests of what the launcher and the ranks import until the first step. benchmarks/start.py measures the time of a start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import ROOT, RUN_SECONDS, Runs

PROGRAM = "import sys; from tests.end_to_end.first_step import launch; launch(*sys.argv[1:])"
NEVER = """
    datasets deepspeed IPython liger_kernel lm_eval matplotlib nltk pandas pyarrow scipy sklearn tensorflow torchvision wandb
    torch._inductor.compile_fx transformers.models.auto.image_processing_auto
"""
"""Modules that a run with the settings of the tests does not need by the end of its first step."""
BY_LAUNCHER = ("llmtrain", "numpy", "sympy", "tensorboard", "torch._dynamo", "torch.distributed", "transformers")
"""Packages of which ranks import no module, because the launcher has imported all that they need."""


def modules_at_first_step(folder: Path, *keys: str) -> dict:
    """Launch a run with a new interpreter. Return the modules of its rank 0, at its start and after its first step."""
    runs, file = Runs(folder), folder / "modules.json"
    keys = (
        "parallel.replicas=2",
        "parallel.shards=1",
        "train.steps=4",
        "checkpoint.every=null",
        "log.tensorboard=true",
        *keys,
    )
    # Without the number of threads that tests set, because a launcher must not start threads without it either.
    environment = {name: value for name, value in runs.environment.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), *runs.command("modules", *keys)[2:]],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert file.exists(), f"ranks are not forked\n{ended.stdout}{ended.stderr}"
    return json.loads(file.read_text())


@pytest.mark.deep
def test_ranks_have_imported_all_that_they_need_and_nothing_that_they_do_not(tmp_path: Path) -> None:
    found = modules_at_first_step(tmp_path)
    assert {"torch", "transformers", "torch.utils.tensorboard"} <= set(found["at start"])
    assert [name for name in NEVER.split() if name in found["after a step"]] == []
    added = set(found["after a step"]) - set(found["at start"])
    assert [name for name in added if name.startswith(BY_LAUNCHER)] == []
    assert found["models"] == "module", "transformers has read all files of all models again"


@pytest.mark.deep
def test_the_launcher_imports_deepspeed_for_all_ranks(tmp_path: Path) -> None:
    found = modules_at_first_step(tmp_path, "parallel.engine=zero", "parallel.zero_stage=1")
    added = set(found["after a step"]) - set(found["at start"])
    assert "deepspeed" in found["at start"] and [name for name in added if name.startswith("torch._inductor")] == []
