"""ZeRO from the command line: by DeepSpeed's launcher, and continuing what FSDP2 began."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.runs import ROOT, Runs, environment

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
LAUNCHER = str(Path(sys.executable).parent / "deepspeed")
SHORT = ("train.steps=12", "checkpoint.every=3", "eval.every=null")
LONGER = ("train.steps=30", "checkpoint.every=3", "eval.every=null", "log.every=1")
"""Long enough to be asked to stop in the middle, on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("zero"))


def losses(runs: Runs, name: str) -> list[float]:
    return [line["train/loss"] for line in runs.lines(name) if "train/loss" in line]


def deepspeed(*arguments: str) -> tuple[int, str]:
    """(exit code, output) of DeepSpeed's launcher on this machine."""
    done = subprocess.run(
        [LAUNCHER, "--master_port", "29617", *arguments],
        cwd=ROOT,
        env={**environment(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def test_both_engines_train_the_same_under_deepspeeds_launcher(runs: Runs) -> None:
    for engine in ("zero", "fsdp2"):
        script = runs.command(engine, f"parallel.engine={engine}", *SHORT)[1:]
        code, output = deepspeed("--num_accelerators", "4", *script)
        assert code == 0, output
        assert "mesh: 2 replicas x 2 shards on cpu (no GPU: parallel.on_cpu)" in output
    assert losses(runs, "zero") == pytest.approx(losses(runs, "fsdp2"), rel=1e-4)


def test_without_a_count_it_starts_one_process_and_the_run_says_what_that_makes(runs: Runs) -> None:
    script = runs.command("one", "parallel.engine=zero", *SHORT)[1:]
    code, output = deepspeed(*script, "parallel.replicas=2", "parallel.shard=2")
    assert code != 0 and "needs 4 processes, there are 1" in output and "--num_accelerators 4" in output
    code, output = deepspeed(*script, "train.steps=3")
    assert code == 0, output
    assert "mesh: 1 replicas x 1 shards on cpu (one process)" in output


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "zero"), ("zero", "fsdp2")])
def test_either_engine_continues_what_the_other_wrote(runs: Runs, first: str, second: str) -> None:
    """In a round, with anchors, outer momentum and inner moments."""
    name = f"{first}_then_{second}"
    process = runs.start(runs.command(name, f"parallel.engine={first}", *LONGER))
    runs.wait_for(name, 6)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    code, output = runs.run(name, f"parallel.engine={second}", *LONGER)
    assert code == 0 and "continuing from" in output, output
    if not runs.path("alone").exists():
        code, output = runs.run("alone", *LONGER)
        assert code == 0, output
    assert losses(runs, name) == pytest.approx(losses(runs, "alone"), rel=1e-4)
