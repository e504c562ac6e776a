"""Tests of ZeRO from the command line: with DeepSpeed's launcher, and in turns with FSDP2."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmtrain.parallel.network import unused_port
from llmtrain.quantities import counted
from tests.end_to_end.runs import Runs, losses, start, summary

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
LAUNCHER = str(Path(sys.executable).parent / "deepspeed")
LONGER = ("train.steps=30", "checkpoint.every=3")
"""Overrides for several more rounds after the one in which the run stops."""
SAMPLE = ("eval.sample_prompt=The", "eval.sample_tokens=8")
"""Overrides for a generated text at the end, for which the weights are gathered from all shards."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("zero"))


def assert_sampled(output: str, run: Path) -> None:
    assert "no sample" not in output and "The model writes" in output
    assert "==== step 12 ====\nThe" in (run / "samples.txt").read_text()


def deepspeed(runs: Runs, *arguments: str) -> tuple[int, str]:
    """Run DeepSpeed's launcher on this machine, and return the exit code and the output."""
    command = [LAUNCHER, "--master_port", str(unused_port()), *arguments]
    return runs.end(start(command, {**runs.environment, "DS_ACCELERATOR": "cpu"}, fresh=True))


@pytest.mark.fresh
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_zero_trains_under_deepspeeds_launcher_as_fsdp2_does_under_ours(runs: Runs, shards: int) -> None:
    name, mesh = f"zero-{shards}", ("parallel.replicas=1", f"parallel.shards={shards}")
    script = runs.command(name, "parallel.engine=zero", *mesh, *SAMPLE)[1:]
    code, output = deepspeed(runs, "--num_accelerators", str(shards), *script)
    assert code == 0, output
    assert f"mesh: 1 replica x {counted(shards, 'shard')} on cpu (as the recipe says)" in output
    assert losses(runs.path(name)) == pytest.approx(losses(runs.reference(1, 1)), rel=1e-4)
    assert_sampled(output, runs.path(name))


@pytest.mark.deep
@pytest.mark.parametrize("engine", ["zero", "fsdp2"])
def test_both_engines_train_the_same_under_deepspeeds_launcher(runs: Runs, engine: str) -> None:
    script = runs.command(f"{engine}-4", f"parallel.engine={engine}", "parallel.zero_stage=1", *SAMPLE)[1:]
    code, output = deepspeed(runs, "--num_accelerators", "4", *script)
    assert code == 0, output
    assert "mesh: 2 replicas x 2 shards on cpu (no GPU: parallel.on_cpu)" in output
    assert losses(runs.path(f"{engine}-4")) == pytest.approx(losses(runs.reference(2, 2)), rel=1e-4)
    assert_sampled(output, runs.path(f"{engine}-4"))


@pytest.mark.deep
def test_without_a_count_it_starts_one_process_and_the_run_says_what_that_makes(runs: Runs) -> None:
    script = runs.command("one", "parallel.engine=zero")[1:]
    code, output = deepspeed(runs, *script, "parallel.replicas=2", "parallel.shards=2")
    assert code != 0 and "needs 4 processes, there is 1" in output and "--num_accelerators 4" in output
    code, output = deepspeed(runs, *script, "train.steps=3")
    assert code == 0, output
    assert "mesh: 1 replica x 1 shard on cpu (one process)" in output


@pytest.mark.deep
@pytest.mark.parametrize(("first", "second"), [("fsdp2", "zero"), ("zero", "fsdp2")])
def test_either_engine_continues_what_the_other_wrote(runs: Runs, first: str, second: str) -> None:
    """The run stops within a round, so the checkpoint has anchors, outer momentum and inner moments."""
    name = f"{first}_then_{second}"
    process = runs.start_held(name, 7, f"parallel.engine={first}", *LONGER)
    process.terminate()
    code, output = runs.end(process)
    assert code == 3 and 7 < summary(runs.path(name))["steps"] <= 9, output
    code, output = runs.run(name, f"parallel.engine={second}", *LONGER)
    assert code == 0 and "continuing from" in output, output
    assert losses(runs.path(name)) == pytest.approx(losses(runs.reference(2, 2, *LONGER)), rel=1e-4)
